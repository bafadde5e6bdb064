"""Find and fetch outputs of ended workflows that a spec or a restart uses as inputs."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import Struct

from distflow.client.client import Client
from distflow.documents.problems import Problem
from distflow.documents.text import did_you_mean
from distflow.errors import InputError, NodeError, NodeUnreachable, NotFound
from distflow.plan.compile import FetchedOutput, with_previous_outputs
from distflow.plan.model import Plan
from distflow.pools.model import Pool
from distflow.protocol.names import attempt_name
from distflow.spec.model import EarlierInput, WorkflowSpec
from distflow.state.directory import state_errors
from distflow.state.record import GroupRecord, TaskRecord, WorkflowRecord

if TYPE_CHECKING:
    from distflow.backends.machines.connection.transfers import Fetched

__all__ = [
    "FetchProgress",
    "OnFetch",
    "OutputSource",
    "add_previous_outputs",
    "fetch_outputs",
    "output_source",
    "previous_output_problems",
]

_TRIES = 3
"""The maximum number of connections for one output. Each continues the transfer of the previous one."""


class OutputSource(Struct, frozen=True, kw_only=True):
    """The location of a task's output."""

    shown: str
    """The text for messages, such as ``prepare of train-7``."""
    attempt: str
    """The name of the attempt on its node."""
    pool: Pool
    """The pool as configured when the workflow was submitted."""
    node: str


class FetchProgress(Struct, frozen=True, kw_only=True):
    """The progress of the transfer of one task's output, in bytes."""

    source: str
    """The task and its workflow, such as ``prepare of train-7``."""
    is_packed: bool
    """Whether the node has finished packing the output, so the transfer has started."""
    done: int
    total: int
    bytes_per_s: float


OnFetch = Callable[[FetchProgress], None]
"""A progress callback."""


def previous_output_problems(client: Client, spec: WorkflowSpec) -> list[Problem]:
    """Return a problem for each input from another workflow if the store shows that this output cannot be fetched."""
    found = []
    for one in _earlier_inputs(spec):
        try:
            _source(one, client)
        except InputError as error:
            found.append(Problem(where=one.mark, message=error.message, hint=error.hint))
    return found


def add_previous_outputs(client: Client, spec: WorkflowSpec, plan: Plan, on_progress: OnFetch) -> Plan:
    """Fetch the outputs that a spec takes from ended workflows, and return the plan with their digests and sizes.

    Raises:
        InputError: if an output does not exist, or if its workflow has not ended.
        NodeError: if an output cannot be fetched.
        StateError: if an output cannot be stored on this machine, such as on a full disk.

    """
    wanted = list(dict.fromkeys((one.workflow, one.task) for one in _earlier_inputs(spec)))
    sources = [_source(EarlierInput(position=0, workflow=workflow, task=task), client) for workflow, task in wanted]
    fetched = fetch_outputs(sources, client.directory.blobs, on_progress) if sources else []
    outputs = {name: FetchedOutput(digest=one.digest, size=one.size) for name, one in zip(wanted, fetched, strict=True)}
    return with_previous_outputs(plan, outputs)


def output_source(client: Client, record: WorkflowRecord, group: GroupRecord, task: TaskRecord) -> OutputSource:
    """Return the location of a task's output: the node where the task ran, even if restarts have kept its group since then.

    Raises ``InputError`` if this attempt of the task has not run.
    """
    shown = f"{task.name} of {group.kept.id if group.kept else record.id}"
    if task.node is None or task.output_dir is None:
        if not task.attempt:
            raise InputError(f"{shown} has not run, so it has no output", hint=f"details: distflow workflow query {record.id}")
        fetch = f"distflow workflow fetch {record.id} --task {task.name} --retry-id {task.attempt - 1}"
        message = f"retry {task.attempt} of {shown} has not run, so it has no output"
        raise InputError(message, hint=f"to copy the output of the attempt before it: {fetch}")
    uuid = group.kept.uuid if group.kept else record.uuid
    attempt = attempt_name(uuid, group.name, task.name, task.attempt)
    return OutputSource(shown=shown, attempt=attempt, pool=client.store.pool(uuid), node=task.node)


def fetch_outputs(sources: Sequence[OutputSource], blobs: Path, on_progress: OnFetch) -> list[Fetched]:
    """Fetch outputs into the directory ``blobs``, and return one result for each source, in order.

    Raises ``NodeError`` for the first output that cannot be fetched. The error names the task. Raises ``StateError`` if
    an output cannot be stored in ``blobs``, such as on a full disk.
    """
    with state_errors(blobs):
        blobs.mkdir(parents=True, exist_ok=True, mode=0o700)
        # Use a separate directory, because the supervisor cleans up its own directory of incoming files.
        with tempfile.TemporaryDirectory(prefix="incoming-", dir=blobs.parent) as folder:
            fetched = [_fetch(source, Path(folder), on_progress) for source in sources]
            for digest in {one.digest for one in fetched}:
                os.replace(Path(folder) / digest, blobs / digest)
            return fetched


def _fetch(source: OutputSource, blobs: Path, on_progress: OnFetch) -> Fetched:
    # Most callers do not need these modules.
    from distflow.backends.machines.backend import transport_of
    from distflow.backends.machines.connection.transfers import TransferRate, fetch_output

    node = source.pool.node(source.node)
    with closing(transport_of(source.pool, node)) as transport:
        for tries_left in reversed(range(_TRIES)):
            try:
                return fetch_output(
                    transport, node.root, node.python, source.attempt, blobs,
                    timeout_s=source.pool.connect_timeout_s, progress=_paced(source, TransferRate().due, on_progress),
                )  # fmt: skip
            except NodeError as error:
                if tries_left and isinstance(error, NodeUnreachable):
                    continue
                message = f"the output of {source.shown} cannot be fetched: {error.detail}"
                raise NodeError(error.node, message, hint=error.hint) from error
    raise AssertionError("the last try returns or raises")


def _paced(
    source: OutputSource, rate_if_due: Callable[[int], float | None], on_progress: OnFetch
) -> Callable[[bool, int, int], None]:
    def report(is_packed: bool, done: int, total: int) -> None:
        rate = rate_if_due(done)
        if rate is not None:
            on_progress(FetchProgress(source=source.shown, is_packed=is_packed, done=done, total=total, bytes_per_s=rate))

    return report


def _earlier_inputs(spec: WorkflowSpec) -> Iterator[EarlierInput]:
    for group in spec.groups:
        for task in group.tasks:
            yield from task.earlier_inputs


def _source(one: EarlierInput, client: Client) -> OutputSource:
    record = client.store.find(one.workflow)
    if not record.state.is_final:
        hint = f"submit again when it has ended; to wait for it: distflow workflow query {record.id} --watch"
        raise InputError(f"the outputs of {record.id} are not complete, because it is {record.status}", hint=hint)
    tasks = {task.name: (group, task) for group in record.groups for task in group.tasks}
    if one.task not in tasks:
        raise NotFound(f"{record.id} has no task `{one.task}`", hint=did_you_mean(one.task, tasks, what="tasks"))
    return output_source(client, record, *tasks[one.task])
