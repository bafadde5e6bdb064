"""Workflows that were submitted: finding and listing them, their status, their events, their tags, and their end."""

from __future__ import annotations

import contextlib
import select
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from distflow.client.client import Client, user_name
from distflow.documents.times import local_second
from distflow.errors import DistflowError, InputError, NotFound, WaitTimeout
from distflow.state.directory import has_room
from distflow.state.event_details import CancelRequested
from distflow.state.record import CancelRequest, Event, GroupRecord, TaskRecord, WorkflowRecord

if TYPE_CHECKING:
    from distflow.plan.model import Plan
    from distflow.pools.model import Pool
    from distflow.state.metrics import Latest
    from distflow.state.search import Search

__all__ = [
    "Cancellation",
    "WorkflowStatus",
    "cancel",
    "change_tags",
    "choose_tasks",
    "find_workflow",
    "group_of",
    "held_ranks",
    "list_tags",
    "list_workflows",
    "newest_ids",
    "pause",
    "plan_of",
    "pool_of",
    "read_events",
    "read_spec",
    "read_status",
    "wait",
    "workflow_ids",
]

_POLL_S = 0.1
_EVENT_POLL_S = 0.3
_WAKE_EVERY = 20
"""Polls for events between two checks that a supervisor is running."""
_TAIL_LINES = 200


def pause(seconds: float) -> None:
    """Wait, ready for Ctrl-C."""
    select.select([], [], [], seconds)


def find_workflow(client: Client, key: str, *, report_age: bool = True) -> WorkflowRecord:
    """Return the record of a workflow, and see to it that unfinished work has a supervisor.

    Args:
        client: Where it is known.
        key: Its id (``<name>-<n>``) or its uuid.
        report_age: Whether to remark how old the record is, where no supervisor kept it up to date.

    Raises:
        NotFound: for an unknown workflow.
        StateError: when the store cannot be read.

    """
    record = client.store.find(key)
    if report_age and not record.state.is_final and not client.store.is_read_only:
        _report_age(client, record)
    client.wake()
    _report_room(client, record)
    return record


def list_workflows(client: Client, search: Search, *, count: int = 20, offset: int = 0) -> list[WorkflowRecord]:
    """Return the workflows that a search finds, the newest first: ``count`` of them after the newest ``offset``."""
    records = list(client.store.list(search, count=count, offset=offset))
    client.wake()
    return records


def newest_ids(client: Client, count: int) -> list[str]:
    """Return the ids of the newest workflows; none where there is no store, which is not created."""
    from distflow.state.directory import find_state_directory

    if not find_state_directory(client.environ).store.exists():
        return []
    return [record.id for record in client.store.list(count=count)]


def workflow_ids(client: Client) -> Mapping[str, str]:
    """Return the id of every workflow in this user's store, by uuid."""
    return client.store.ids()


def plan_of(client: Client, record: WorkflowRecord) -> Plan:
    """Return the plan that a workflow runs."""
    return client.store.plan(record.uuid)


def pool_of(client: Client, record: WorkflowRecord) -> Pool:
    """Return the pool of a workflow as it was configured when it was submitted."""
    return client.store.pool(record.uuid)


def read_spec(client: Client, record: WorkflowRecord, *, template: bool = False) -> str:
    """Return the spec of a workflow as it ran; with ``template`` as it was written. A node may have written it."""
    return client.store.document(record.uuid, "template" if template else "spec")


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkflowStatus:
    """What the ends of a workflow's logs show."""

    last_lines: Mapping[tuple[str, str, int], str]
    """The last line that tasks printed, by group, task and attempt."""
    metrics: Mapping[str, Latest]
    """The latest metrics of each group's first rank, by the group's name."""


def read_status(client: Client, record: WorkflowRecord) -> WorkflowStatus:
    """Return the last line of each attempt, and the latest metrics of each group, as far as the logs' last pages show them."""
    from distflow.state.logs import LogLine
    from distflow.state.metrics import Metric, latest, read_metrics
    from distflow.supervisor.printed_errors import without_launcher

    last_lines: dict[tuple[str, str, int], str] = {}
    metrics: dict[str, Latest] = {}
    for group in record.groups:
        found: list[Metric] = []
        present = {(task.name, task.attempt) for task in group.tasks}
        for task in group.attempts:
            lines = client.mirror.last_lines(record.uuid, group.name, task.name, task.attempt, _TAIL_LINES)
            if own := without_launcher(lines) or lines:
                last_lines[group.name, task.name, task.attempt] = own[-1]
            if (task.name, task.attempt) in present:
                found += read_metrics(LogLine(task.name, task.attempt, None, line) for line in lines)
        if found:
            metrics[group.name] = min(latest(found), key=lambda one: (one.rank is None, one.rank or 0))
    return WorkflowStatus(last_lines=last_lines, metrics=metrics)


def choose_tasks(record: WorkflowRecord, names: Collection[str], ranks: Collection[int] = ()) -> list[tuple[str, TaskRecord]]:
    """Return the tasks (with their groups) of these names or holding these ranks; all of them when neither is given.

    Raises ``NotFound`` that says which there are.
    """
    tasks = [(group.name, task) for group in record.groups for task in group.tasks]
    known = {task.name for _, task in tasks}
    for name in names:
        if name not in known:
            from distflow.documents.text import did_you_mean

            raise NotFound(f"{record.id} has no task {name!r}", hint=did_you_mean(name, known, what="tasks"))
    chosen = set(names)
    for rank in ranks:
        holders = {task.name for _, task in tasks if rank in held_ranks(task.ranks)}
        if not holders:
            held = ", ".join(f"{task.name} {task.ranks}" for _, task in tasks if task.ranks)
            raise NotFound(
                f"no task of {record.id} holds rank {rank}", hint=f"ranks: {held}" if held else "its tasks have no ranks"
            )
        chosen |= holders
    return [(group, task) for group, task in tasks if not (names or ranks) or task.name in chosen]


def held_ranks(ranks: str) -> range:
    """Return the ranks of a task, such as ``8-15``."""
    first, _, last = ranks.partition("-")
    return range(int(first), int(last or first) + 1) if first else range(0)


def read_events(
    client: Client,
    record: WorkflowRecord,
    *,
    tasks: Collection[str] | None = None,
    attempt: int | None = None,
    follow: bool = False,
) -> Iterator[Event]:
    """Yield the events of a workflow in their order.

    Args:
        client: Where it is known.
        record: The workflow.
        tasks: Only those of these tasks.
        attempt: Only those of this attempt, counted from 0.
        follow: Whether to go on until the workflow has ended.

    """
    events = _follow_events(client, record) if follow else iter(client.store.events(record.uuid))
    return (one for one in events if (tasks is None or one.task in tasks) and attempt in (None, one.attempt))


def _follow_events(client: Client, record: WorkflowRecord) -> Iterator[Event]:
    last, polls = 0, 0
    while True:
        # Asked before the events are, so that those of the end are among them.
        over = client.store.find(record.uuid).state.is_final
        for event in client.store.events(record.uuid, after=last):
            last = event.sequence
            yield event
        if over:
            return
        polls += 1
        if polls % _WAKE_EVERY == 0:
            client.wake()
        pause(_EVENT_POLL_S)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cancellation:
    """The answer to one request to end a workflow."""

    key: str
    """The id or uuid that was asked for."""
    record: WorkflowRecord | None = None
    """The workflow as it was then; ``None`` when the request was refused."""
    error: DistflowError | None = None
    """Why it was refused."""


def cancel(client: Client, keys: Sequence[str], *, message: str = "", force: bool = False) -> list[Cancellation]:
    """Ask for the end of workflows, each of which may be refused, and see to it that a supervisor ends them.

    Args:
        client: Where they are known.
        keys: Their ids or uuids.
        message: Why; kept with the workflow.
        force: Whether to kill at once, without the grace after TERM.

    Raises:
        SupervisorError: when no supervisor comes up.

    """
    client.writable_directory()
    results = []
    for key in keys:
        try:
            results.append(Cancellation(key=key, record=_request_end(client, key, message, force)))
        except DistflowError as error:
            results.append(Cancellation(key=key, error=error))
    if any(one.error is None for one in results):
        client.ensure_supervisor()
    return results


def _request_end(client: Client, key: str, message: str, force: bool) -> WorkflowRecord:
    record = client.store.find(key)
    if record.state.is_final:
        raise InputError(f"{record.id} has ended already: {record.status}")
    at, user = time.time(), user_name()  # noqa: TID251  the moment of the request
    details = CancelRequested(user=user, message=message, is_forced=force)
    request = CancelRequest(at=at, by=user, message=message, force=force)
    client.store.request_cancel(record.uuid, request, Event(at=at, details=details, workflow=record.uuid))
    return record


def wait(
    client: Client,
    keys: Sequence[str],
    *,
    timeout_s: float | None = None,
    on_timeout: Callable[[WorkflowRecord], Sequence[str]] = lambda _: (),
) -> list[WorkflowRecord]:
    """Return the final records of workflows when all of them have ended.

    Args:
        client: Where they are known.
        keys: Their ids or uuids.
        timeout_s: Seconds after which to give up.
        on_timeout: Returns sentences about a workflow that has not ended, for the hint of the error.

    Raises:
        WaitTimeout: when ``timeout_s`` has passed.

    """
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    polls = 0
    while True:
        records = [client.store.find(key) for key in keys]
        if all(record.state.is_final for record in records):
            return records
        if deadline is not None and time.monotonic() >= deadline:
            late = [record for record in records if not record.state.is_final]
            hint = [line for record in late for line in on_timeout(record)]
            raise WaitTimeout(
                f"not ended within {timeout_s:g} s: {', '.join(record.id for record in late)}",
                hint="\n".join([*hint, f"the supervisor goes on; its log: {client.directory.supervisor_log}"]),
            )
        polls += 1
        if polls % _WAKE_EVERY == 0:
            client.wake()
        pause(_POLL_S)


def list_tags(client: Client) -> dict[str, int]:
    """Return every tag with the number of workflows that have it."""
    return client.store.tags()


def change_tags(
    client: Client, keys: Sequence[str], *, add: Collection[str] = (), remove: Collection[str] = ()
) -> dict[str, tuple[str, ...]]:
    """Remove tags from workflows and add others; return all tags of each, by the workflow's id.

    Raises ``NotFound``, in which case no workflow was changed, and ``InputError`` for what cannot be a tag.
    """
    from distflow.spec.labels import check_tag

    for one in add:
        try:
            check_tag(one)
        except ValueError as error:
            raise InputError(str(error)) from None
    # All are looked up first: one that is not there changes none.
    records = [client.store.find(key) for key in keys]
    return {one.id: client.store.tag(one.uuid, add=add, remove=remove) for one in records}


def _report_room(client: Client, record: WorkflowRecord) -> None:
    """Remark that output waits on nodes for room on this machine."""
    if all(task.log_complete or task.started_at is None for group in record.groups for task in group.attempts):
        return
    from distflow.documents.quantities import bytes_text
    from distflow.runtime.files.durable import reserve_bytes

    missing, reserve = reserve_bytes(str(client.directory.logs))
    if missing:
        where = f"the disk of {client.directory.logs} has less than {bytes_text(reserve)} free"
        client.notify(f"warning: {where}: new output stays on its nodes; free {bytes_text(missing)} there")


def _report_age(client: Client, record: WorkflowRecord) -> None:
    """Remark how old a record is that no supervisor keeps up to date."""
    from distflow.supervisor.process import is_running

    directory = client.directory
    with contextlib.suppress(OSError):
        if is_running(directory):
            return
    seen = max([record.submitted_at, *(event.at for event in client.store.events(record.uuid))])
    then = "one is starting now" if has_room(directory) else f"none can be, as the disk of {directory.path} is full"
    client.notify(f"no supervisor was at work: this is as of {local_second(seen)}; {then}")


def group_of(record: WorkflowRecord, name: str) -> GroupRecord:
    """Return a group of a workflow. Raises ``NotFound`` that says which there are."""
    known = [one.name for one in record.groups]
    if name not in known:
        from distflow.documents.text import did_you_mean

        raise NotFound(f"{record.id} has no group {name!r}", hint=did_you_mean(name, known, what="groups"))
    return record.group(name)
