"""Find, list, cancel and tag submitted workflows, wait for them, list their tasks, and read their events and specs."""

from __future__ import annotations

import contextlib
import select
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from msgspec import Struct

from distflow.client.client import Client, user_name
from distflow.documents.quantities import local_second
from distflow.errors import DistflowError, InputError, NotFound, RecordUnreadable, WaitTimeout
from distflow.lifecycle.states import OSMO_STATUSES, Reason, State, WorkflowState, workflow_status_of
from distflow.state.directory import has_room
from distflow.state.record import CancelRequest, EventRecord, GroupRecord, TaskRecord, WorkflowRecord

if TYPE_CHECKING:
    from distflow.plan.model import Plan
    from distflow.pools.model import Pool
    from distflow.spec.model import ResourceSpec
    from distflow.state.metrics import Latest, Metric
    from distflow.state.samples import Usage
    from distflow.state.search import Search

__all__ = [
    "Cancellation",
    "ListedTask",
    "WorkflowActivity",
    "cancel",
    "change_tags",
    "check_command",
    "choose_tasks",
    "find_workflow",
    "group_of",
    "held_ranks",
    "list_tags",
    "list_tasks",
    "list_workflows",
    "outputs_until",
    "parse_statuses",
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
"""The number of polls between two checks that a supervisor is running."""
_TAIL_LINES = 200
_RECENT_SAMPLES = 20


def pause(seconds: float) -> None:
    """Sleep for some seconds. Ctrl-C interrupts it."""
    # The lint rules of this project forbid `time.sleep`, because most code must wait for a condition instead.
    select.select([], [], [], seconds)


def find_workflow(client: Client, key: str, *, report_age: bool = True) -> WorkflowRecord:
    """Return the record of a workflow, and start a supervisor if there is unfinished work and none is running.

    Args:
        client: The client whose store has the workflow.
        key: The id (``<name>-<n>``) or the uuid of the workflow. Also its name, for the latest run, or ``-``, for the latest
            workflow.
        report_age: Whether to notify the user how old the record is if no supervisor was running.

    Returns:
        The record of the workflow as stored now.

    Raises:
        NotFound: if the workflow does not exist.
        StateError: if the store cannot be read.

    """
    record = client.store.find(key)
    if report_age and not record.state.is_final and not client.store.is_read_only:
        _report_age(client, record)
    client.wake()
    _report_room(client, record)
    return record


def list_workflows(client: Client, search: Search, *, count: int = 20, offset: int = 0) -> list[WorkflowRecord]:
    """Return the workflows that match a search, newest first, without their groups.

    Args:
        client: The client whose store has the workflows.
        search: The conditions that a workflow must meet.
        count: The maximum number of workflows to return.
        offset: The number of newest matching workflows to skip.

    Raises:
        InputError: if a label selector of the search is not valid.
        StateError: if the store cannot be read.

    """
    records = list(client.store.list(search, count=count, offset=offset))
    client.wake()
    return records


def parse_statuses(statuses: Sequence[str]) -> tuple[tuple[WorkflowState, Reason | None], ...]:
    """Return every pair of state and reason that is shown as one of these statuses. A status that only OSMO uses has no pair.

    Raises ``InputError`` for an unknown status.
    """
    known: dict[str, list[tuple[WorkflowState, Reason | None]]] = {}
    for state in WorkflowState:
        for reason in (None, *Reason):
            if state.is_final or reason is None:
                known.setdefault(workflow_status_of(state, reason), []).append((state, reason))
    for status in statuses:
        if status.upper() not in {*known, *OSMO_STATUSES}:
            from distflow.documents.text import did_you_mean

            raise InputError(f"`{status}` is not a status of a workflow", hint=did_you_mean(status, known, what="statuses"))
    return tuple(pair for status in statuses for pair in known.get(status.upper(), ()))


def workflow_ids(client: Client) -> Mapping[str, str]:
    """Return a mapping from uuid to id of every workflow in this user's store."""
    return client.store.ids()


def plan_of(client: Client, record: WorkflowRecord) -> Plan:
    """Return the plan of a workflow. Raises ``RecordUnreadable`` if this version of distflow cannot read it."""
    return client.store.plan(record.uuid)


def pool_of(client: Client, record: WorkflowRecord) -> Pool:
    """Return the pool of a workflow as configured when the workflow was submitted."""
    return client.store.pool(record.uuid)


def check_command(record: WorkflowRecord) -> str:
    """Return the command that checks the nodes of a workflow's pool."""
    from distflow.pools.hostfile import HOSTFILE_POOL

    return f"distflow pool check {'--hostfile FILE' if record.pool == HOSTFILE_POOL else f'--pool {record.pool}'}"


def read_spec(client: Client, record: WorkflowRecord, *, template: bool = False) -> str:
    """Return the text of a workflow's spec. For an adopted workflow, this is the text that was copied from a node.

    Args:
        client: The client whose store has the workflow.
        record: The workflow.
        template: Whether to return the template as submitted. Default: the rendered spec that ran.

    Raises:
        StateError: if the store cannot be read.

    """
    return client.store.document(record.uuid, "template" if template else "spec")


class WorkflowActivity(Struct, frozen=True, kw_only=True):
    """The latest output, metrics and use of resources of a workflow, from the ends of its logs on this machine."""

    last_lines: Mapping[tuple[str, str, int], str]
    """The last line of each attempt's output, by group, task and attempt number, if possible without lines of a launcher."""
    metrics: Mapping[str, Latest]
    """The latest metrics of the lowest rank of each group that printed metrics, by the name of the group."""
    usage: Mapping[tuple[str, str, int], Usage]
    """The latest use of resources by each running task, by group, task and attempt number."""
    outputs_until: float | None
    """The time until which the output files are kept, in seconds since the epoch (see ``outputs_until``)."""


def read_status(client: Client, record: WorkflowRecord) -> WorkflowActivity:
    """Return the last line of each attempt, the latest metrics and use of resources, and how long output files are kept.

    This reads only the last lines of each log, so older metrics are not found.

    Args:
        client: The client whose store has the workflow.
        record: The workflow.

    Raises:
        StateError: if the state directory cannot be read.

    """
    last_lines: dict[tuple[str, str, int], str] = {}
    metrics: dict[str, Latest] = {}
    usage: dict[tuple[str, str, int], Usage] = {}
    for group in record.groups:
        found: list[Metric] = []
        present = {(task.name, task.attempt) for task in group.tasks}
        for task in group.tasks:
            if task.state is State.RUNNING:
                from distflow.state.logs import LogSource
                from distflow.state.samples import last_samples, usage_of

                folder = client.mirror.folder(record.uuid, group.name, task.name, task.attempt)
                source = LogSource(task.name, task.attempt, folder)
                if (samples := last_samples(source, most=_RECENT_SAMPLES)) is not None:
                    usage[group.name, task.name, task.attempt] = usage_of(samples)
        for task in group.attempts:
            lines = client.mirror.last_lines(record.uuid, group.name, task.name, task.attempt, _TAIL_LINES)
            if not lines:
                continue
            from distflow.state.logs import LogLine
            from distflow.state.metrics import read_metrics
            from distflow.supervisor.error_reports import without_launcher

            if own := without_launcher(lines) or lines:
                last_lines[group.name, task.name, task.attempt] = own[-1]
            if (task.name, task.attempt) in present:
                found += read_metrics(LogLine(task.name, task.attempt, None, line) for line in lines)
        if found:
            from distflow.state.metrics import latest

            metrics[group.name] = min(latest(found), key=lambda one: (one.rank is None, one.rank or 0))
    return WorkflowActivity(last_lines=last_lines, metrics=metrics, usage=usage, outputs_until=outputs_until(client, record))


def outputs_until(client: Client, record: WorkflowRecord) -> float | None:
    """Return the time until which `distflow node clean` keeps the output files of a workflow, in seconds since the epoch.

    This is the first end of a task plus the retention time of the pool at submission: `node clean` decides by the last change
    of the workflow's files on each node. Return ``None`` before the end of the workflow, if no task has run, if the files are
    deleted with the nodes (Kubernetes), or if the stored pool has no retention time. This does not connect to a node.
    """
    ran = [task for group in record.groups for task in group.tasks if task.output_dir is not None] or [
        task for group in record.groups for task in group.attempts if task.output_dir is not None
    ]
    if not record.state.is_final or record.ended_at is None or not ran:
        return None
    from distflow.backends.registry import WITHOUT_LASTING_FILES

    kept = client.store.retention(record.uuid)
    if kept.retention_s is None or kept.backend in WITHOUT_LASTING_FILES:
        return None
    return min(task.end.ended_at if task.end is not None else record.ended_at for task in ran) + kept.retention_s


def choose_tasks(record: WorkflowRecord, names: Collection[str], ranks: Collection[int] = ()) -> list[tuple[str, TaskRecord]]:
    """Return tasks of a workflow, each with the name of its group, in the order of the spec.

    Args:
        record: The workflow.
        names: Names of tasks to return.
        ranks: Global ranks. Each task that holds one of them is returned, too.

    Returns:
        The chosen tasks, or all tasks if ``names`` and ``ranks`` are empty.

    Raises:
        NotFound: if a name or a rank does not belong to any task. The hint lists existing ones.

    """
    tasks = [(group.name, task) for group in record.groups for task in group.tasks]
    known = {task.name for _, task in tasks}
    for name in names:
        if name not in known:
            from distflow.documents.text import did_you_mean

            raise NotFound(f"{record.id} has no task `{name}`", hint=did_you_mean(name, known, what="tasks"))
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
    """Parse the ranks of a task, such as ``8-15`` or ``3``. An empty text gives an empty range."""
    first, _, last = ranks.partition("-")
    return range(int(first), int(last or first) + 1) if first else range(0)


def read_events(
    client: Client,
    record: WorkflowRecord,
    *,
    tasks: Collection[str] | None = None,
    attempt: int | None = None,
    follow: bool = False,
) -> Iterator[EventRecord]:
    """Return an iterator over the events of a workflow, in the order in which they were stored.

    Args:
        client: The client whose store has the workflow.
        record: The workflow.
        tasks: Yield only events of these tasks. Default: all events.
        attempt: Yield only events of this attempt, counted from 0.
        follow: Whether to wait for new events until the workflow has ended.

    Raises:
        StateError: if the store cannot be read.

    """
    events = _follow_events(client, record) if follow else iter(client.store.events(record.uuid))
    return (one for one in events if (tasks is None or one.task in tasks) and attempt in (None, one.attempt))


def _follow_events(client: Client, record: WorkflowRecord) -> Iterator[EventRecord]:
    last, polls = 0, 0
    while True:
        # Read the state before the events, so the last read includes the events of the end.
        is_over = client.store.find(record.uuid).state.is_final
        for event in client.store.events(record.uuid, after=last):
            last = event.sequence
            yield event
        if is_over:
            return
        polls += 1
        if polls % _WAKE_EVERY == 0:
            client.wake()
        pause(_EVENT_POLL_S)


class Cancellation(Struct, frozen=True, kw_only=True):
    """The result of a request to cancel one workflow."""

    key: str
    """The requested id, uuid or name."""
    record: WorkflowRecord | None = None
    """The workflow at the time of the request, or ``None`` if the request was refused."""
    error: DistflowError | None = None
    """The reason for the refusal."""


def cancel(client: Client, keys: Sequence[str], *, message: str = "", force: bool = False) -> list[Cancellation]:
    """Request the cancellation of workflows, and make sure that a supervisor is running to stop them.

    This function does not wait for the end of the workflows. See ``wait``.

    Args:
        client: The client whose store has the workflows.
        keys: The ids, uuids or names of the workflows. A name stands for its latest run.
        message: A reason that is stored with each workflow.
        force: Whether to kill the tasks immediately, without a grace period after SIGTERM.

    Returns:
        One result for each key, in order. A workflow that does not exist or has ended has an ``error``; it is not raised.

    Raises:
        StateError: if the state directory is not writable.
        SupervisorError: if the supervisor does not start.

    """
    client.writable_directory()
    results = []
    for key in keys:
        try:
            results.append(Cancellation(key=key, record=_request_cancel(client, key, message, force)))
        except DistflowError as error:
            results.append(Cancellation(key=key, error=error))
    if any(one.error is None for one in results):
        client.ensure_supervisor()
    return results


def _request_cancel(client: Client, key: str, message: str, force: bool) -> WorkflowRecord:
    from distflow.state.event_details import CancelRequested

    record = client.store.find(key)
    if record.state.is_final:
        hint = f"there is nothing to stop. Its result: distflow workflow query {record.id}"
        raise InputError(f"{record.id} has already ended: {record.status}", hint=hint)
    at, user = time.time(), user_name()  # noqa: TID251  the moment of the request
    details = CancelRequested(user=user, message=message, is_forced=force)
    request = CancelRequest(at=at, by=user, message=message, force=force)
    client.store.request_cancel(record.uuid, request, EventRecord(at=at, details=details, workflow=record.uuid))
    return record


def wait(
    client: Client,
    keys: Sequence[str],
    *,
    timeout_s: float | None = None,
    on_timeout: Callable[[WorkflowRecord], Sequence[str]] = lambda _: (),
) -> list[WorkflowRecord]:
    """Wait until all of these workflows have ended.

    Args:
        client: The client whose store has the workflows.
        keys: The ids, uuids or names of the workflows. A name stands for its latest run at the time of this call.
        timeout_s: The maximum time to wait, in seconds. Default: no limit.
        on_timeout: Called with each workflow that has not ended in time. It returns lines for the hint of the error.

    Returns:
        The final records, in the order of ``keys``.

    Raises:
        NotFound: if a workflow does not exist.
        WaitTimeout: if a workflow has not ended after ``timeout_s``.

    """
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    polls = 0
    uuids = [client.store.find(key).uuid for key in keys]
    while True:
        records = [client.store.find(uuid) for uuid in uuids]
        if all(record.state.is_final for record in records):
            return records
        if deadline is not None and time.monotonic() >= deadline:
            late = [record for record in records if not record.state.is_final]
            hint = [line for record in late for line in on_timeout(record)]
            continuing = "it continues" if len(late) == 1 else "they continue"
            raise WaitTimeout(
                f"{', '.join(one.id for one in late)} {'has' if len(late) == 1 else 'have'} not ended within {timeout_s:g} s",
                hint="\n".join([*hint, f"{continuing} to run; the supervisor's log: {client.directory.supervisor_log}"]),
            )
        polls += 1
        if polls % _WAKE_EVERY == 0:
            client.wake()
        pause(_POLL_S)


def list_tags(client: Client) -> dict[str, int]:
    """Return every tag and the number of workflows that have it."""
    return client.store.tags()


def change_tags(
    client: Client, keys: Sequence[str], *, add: Collection[str] = (), remove: Collection[str] = ()
) -> dict[str, tuple[str, ...]]:
    """Remove tags from workflows, then add others.

    Args:
        client: The client whose store has the workflows.
        keys: The ids, uuids or names of the workflows. A name stands for its latest run.
        add: Tags to add.
        remove: Tags to remove. A tag that a workflow does not have is ignored.

    Returns:
        All tags of each workflow after the change, by the id of the workflow.

    Raises:
        InputError: if a tag to add is not valid.
        NotFound: if a workflow does not exist. In this case, no workflow is changed.
        StateError: if the store is not writable.

    """
    from distflow.spec.names import check_tag

    for one in add:
        try:
            check_tag(one)
        except ValueError as error:
            raise InputError(str(error)) from None
    # Look up all workflows first, so an unknown one fails before any change.
    records = [client.store.find(key) for key in keys]
    return {one.id: client.store.tag(one.uuid, add=add, remove=remove) for one in records}


def _report_room(client: Client, record: WorkflowRecord) -> None:
    """Warn if nodes hold back output because this machine's disk is almost full."""
    if all(task.log_complete or task.started_at is None for group in record.groups for task in group.attempts):
        return
    from distflow.documents.quantities import bytes_text
    from distflow.runtime.files.safe_files import reserve_bytes

    missing, reserve = reserve_bytes(str(client.directory.logs))
    if missing:
        where = f"the disk of {client.directory.logs} has less than {bytes_text(reserve)} of free space"
        client.notify(f"warning: {where}, so new output stays on the nodes until you free {bytes_text(missing)}")


def _report_age(client: Client, record: WorkflowRecord) -> None:
    """Notify the user how old a record is if no supervisor is running."""
    from distflow.supervisor.process import is_running

    directory = client.directory
    with contextlib.suppress(OSError):
        if is_running(directory):
            return
    updated_at = max([record.submitted_at, *(event.at for event in client.store.events(record.uuid))])
    then = (
        "a supervisor is starting now"
        if has_room(directory)
        else f"none can start, because the disk of {directory.path} is full"
    )
    client.notify(f"no supervisor was running, so this status is from {local_second(updated_at)}; {then}")


def group_of(record: WorkflowRecord, name: str) -> GroupRecord:
    """Return the group of this name. Raises ``NotFound`` with the names of the existing groups."""
    known = [one.name for one in record.groups]
    if name not in known:
        from distflow.documents.text import did_you_mean

        raise NotFound(f"{record.id} has no group `{name}`", hint=did_you_mean(name, known, what="groups"))
    return record.group(name)


_PAGE = 200


class ListedTask(Struct, frozen=True, kw_only=True):
    """A task with its workflow."""

    workflow: WorkflowRecord
    task: TaskRecord
    resource: ResourceSpec
    """The resources that the task requests."""

    @property
    def amounts(self) -> tuple[float, int, float, int]:
        """The requested storage (GiB), CPUs, memory (GiB) and GPUs."""
        one = self.resource
        return (one.storage or 0) / 2**30, one.cpu or 0, (one.memory or 0) / 2**30, one.gpu or 0


def list_tasks(
    client: Client, search: Search, *, is_wanted: Callable[[TaskRecord], bool], count: int | None = None, offset: int = 0
) -> list[ListedTask]:
    """Return the latest attempts of tasks, newest first.

    A workflow whose record cannot be read is left out, with a warning through ``client.notify``.

    Args:
        client: The client whose store has the workflows.
        search: The conditions that a workflow must meet.
        is_wanted: A filter that returns whether to include a task.
        count: The maximum number of tasks to return. Default: all.
        offset: The number of newest matching tasks to skip.

    Raises:
        InputError: if a label selector of the search is not valid.
        StateError: if the store cannot be read.

    """
    rows: list[ListedTask] = []
    for row in _newest_first(client, search):
        if count is not None and len(rows) >= offset + count:
            break
        if is_wanted(row.task):
            rows.append(row)
    client.wake()
    return rows[offset:]


def _newest_first(client: Client, search: Search) -> Iterator[ListedTask]:
    from distflow.spec.model import ResourceSpec  # only this function creates one

    offset = 0
    while records := client.store.list(search, count=_PAGE, offset=offset):
        for found in records:
            try:
                record, plan = client.store.find(found.uuid), client.store.plan(found.uuid)
            except RecordUnreadable as error:
                client.notify(f"warning: {found.id} is left out: {error.message}")
                continue
            resources = {(group.name, launch.task): launch.resource for group in plan.groups for launch in group.launches}
            for group in reversed(record.groups):
                for task in reversed(group.tasks):
                    resource = resources.get((group.name, task.name), ResourceSpec())
                    yield ListedTask(workflow=record, task=task, resource=resource)
        offset += len(records)
