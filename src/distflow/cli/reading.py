"""What the commands that only read share: the workflow they are asked about, waking, and streams that may close."""

from __future__ import annotations

import contextlib
import os
import select
import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from distflow.cli import wiring
from distflow.cli.metrictext import holds_rank
from distflow.cli.times import local_second
from distflow.errors import NotFound
from distflow.state.directory import StateDirectory, find_state_directory, has_room

if TYPE_CHECKING:
    from distflow.state.record import TaskRecord, WorkflowRecord
    from distflow.state.store import Store

__all__ = [
    "WorkflowArgument",
    "choose_tasks",
    "complete_workflow",
    "open_workflow",
    "pause",
    "reading_directory",
    "until_closed",
    "wake",
]

_COMPLETIONS = 50


def complete_workflow(incomplete: str) -> list[str]:
    """Return the newest ids that begin so. Never raises and never prints: a shell is waiting at a prompt."""
    try:
        directory = find_state_directory(os.environ)
        if not directory.store.exists():
            return []
        with wiring.open_store(directory, quiet=True) as store:
            return [record.id for record in store.list(count=_COMPLETIONS) if record.id.startswith(incomplete)]
    except Exception:  # noqa: BLE001  no completion is better than a traceback in the prompt
        return []


WorkflowArgument = Annotated[
    str,
    typer.Argument(
        metavar="ID", help="The workflow: its id (<name>-<n>) or uuid.", show_default=False, autocompletion=complete_workflow
    ),
]


@contextmanager
def open_workflow(key: str, *, tell_age: bool = True) -> Iterator[tuple[StateDirectory, Store, WorkflowRecord]]:
    """Open the store, find a workflow in it, and see to it that unfinished work has a supervisor."""
    directory = reading_directory()
    with wiring.open_store(directory) as store:
        record = store.find(key)
        if tell_age and not record.state.is_final and not store.is_read_only:
            _tell_age(directory, store, record)
        wake(directory, store)
        _tell_room(directory, record)
        with until_closed():
            yield directory, store, record


def reading_directory() -> StateDirectory:
    """Return the state directory; whether it can be written is only tried when there is nothing yet. Raises ``StateError``.

    One of another user is only read: what can be written is supervised with this user's rights.
    """
    from distflow.state.opening import is_read_only  # sqlite3, which completion of nothing does not need

    directory = find_state_directory(os.environ)
    if not os.path.exists(directory.store):
        return directory.ensure()
    if not is_read_only(directory.store):
        directory.check_owner()
    return directory


def wake(directory: StateDirectory, store: Store) -> None:
    """Start a supervisor if one is missing. A reader answers in any case, so failing to is only told."""
    try:
        wiring.wake_if_needed(directory, store)
    except OSError as error:
        print(f"warning: no supervisor could be started: {error}", file=sys.stderr)


@contextmanager
def until_closed() -> Iterator[None]:
    """End quietly and well when the reader of our output (``head``, ``less``) has seen enough."""
    try:
        yield
    except BrokenPipeError:
        raise typer.Exit(0) from None


def pause(seconds: float) -> None:
    """Wait, ready for Ctrl-C."""
    select.select([], [], [], seconds)


def choose_tasks(record: WorkflowRecord, names: Collection[str], ranks: Collection[int] = ()) -> list[tuple[str, TaskRecord]]:
    """Return the tasks (with their groups) of these names or holding these ranks; all of them when neither is given.

    Raises ``NotFound`` that says which there are.
    """
    tasks = [(group.name, task) for group in record.groups for task in group.tasks]
    known = {task.name for _, task in tasks}
    for name in names:
        if name not in known:
            from distflow.documents.words import did_you_mean

            raise NotFound(f"{record.id} has no task {name!r}", hint=did_you_mean(name, known, what="tasks"))
    chosen = set(names)
    for rank in ranks:
        holders = {task.name for _, task in tasks if holds_rank(task.ranks, rank)}
        if not holders:
            held = ", ".join(f"{task.name} {task.ranks}" for _, task in tasks if task.ranks)
            raise NotFound(
                f"no task of {record.id} holds rank {rank}", hint=f"ranks: {held}" if held else "its tasks have no ranks"
            )
        chosen |= holders
    return [(group, task) for group, task in tasks if not (names or ranks) or task.name in chosen]


def _tell_room(directory: StateDirectory, record: WorkflowRecord) -> None:
    """Say that output waits on nodes for room on this machine."""
    if all(task.log_complete or task.started_at is None for group in record.groups for task in group.attempts):
        return
    from distflow.documents.quantities import bytes_text
    from distflow.runtime.files.durable import reserve_bytes

    missing, reserve = reserve_bytes(str(directory.logs))
    if missing:
        where = f"the disk of {directory.logs} has less than {bytes_text(reserve)} free"
        print(f"warning: {where}: new output stays on its nodes; free {bytes_text(missing)} there", file=sys.stderr)


def _tell_age(directory: StateDirectory, store: Store, record: WorkflowRecord) -> None:
    from distflow.supervisor.process import is_running

    with contextlib.suppress(OSError):
        if is_running(directory):
            return
    seen = max([record.submitted_at, *(event.at for event in store.events(record.uuid))])
    then = "one is starting now" if has_room(directory) else f"none can be, as the disk of {directory.path} is full"
    print(f"no supervisor was at work: this is as of {local_second(seen)}; {then}", file=sys.stderr)
