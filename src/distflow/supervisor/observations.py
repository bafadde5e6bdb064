"""Apply observations to the records, one at a time, and adjust the times of stored records to the current clock. Pure.

Observations may come late, twice or out of order, because a reconnection repeats the node's reports. Each is applied only if
it is still valid: for example, an attempt that has ended does not start again.

Times in records must survive a reboot, so they are wall-clock times. If the machine's clock was set back after they were
written, they are in the future. Every wait that is counted from them would then last longer by the same amount.
"""

from __future__ import annotations

from distflow.backends.base import (
    Absent,
    AttemptObservation,
    Collected,
    CollectFailed,
    Collecting,
    CollectUnanswered,
    Ended,
    InputNotFetched,
    Leased,
    LeaseObservation,
    LeaseRefused,
    LeaseWaits,
    LogComplete,
    NodeDown,
    NodeUp,
    OutputLost,
    OutputWaits,
    Prepared,
    PrepareFailed,
    Released,
    Staging,
    Started,
    StopAccepted,
    Unanswered,
    VenvBuilt,
    VenvFailed,
    VenvObservation,
    VenvProgress,
)
from distflow.documents.quantities import seconds_text
from distflow.documents.text import few
from distflow.lifecycle.exits import ExitActions
from distflow.lifecycle.states import Reason, State
from distflow.plan.model import Binding, Plan
from distflow.protocol.ends import EndReason
from distflow.state.event_details import (
    AttemptForgotten,
    EventDetails,
    GroupCannotStart,
    GroupWaiting,
    LeaseGranted,
    LeaseLost,
    NodeBecameReachable,
    NodeBecameUnreachable,
    OrphanGone,
    OrphanStopping,
    OutputCollected,
    OutputHeldBack,
    OutputLosing,
    TaskCannotStart,
    TaskReady,
    TaskStarted,
    TaskStatus,
    VenvReady,
)
from distflow.state.event_text import event_text
from distflow.state.record import (
    CancelRequest,
    EventRecord,
    GroupRecord,
    OrphanState,
    Outage,
    Refusal,
    Saved,
    TaskRecord,
    TransferProgress,
    UnreachableNodes,
    VenvBuild,
    WorkflowRecord,
)
from distflow.structs import replace
from distflow.supervisor.checkpoints import apply_checkpoint
from distflow.supervisor.failures import by_exit_actions, conclude, end_from
from distflow.supervisor.snapshot import NodeView
from distflow.supervisor.transfers import apply_input_not_fetched

__all__ = [
    "CANNOT_START",
    "adjust_cancel_time",
    "adjust_times",
    "announce_wait",
    "apply_node_observation",
    "apply_observation",
    "end_unstarted",
    "node_details",
    "stop_unstarted",
    "update_node_view",
    "without_build",
]


CANNOT_START = (Reason.START_ERROR, Reason.IMAGE_PULL, Reason.DATA)
"""The reasons of an attempt that holds a lease but can never start."""

_ANNOUNCED = 32
"""The number of last messages of a waiting group that are remembered, so that the same event is not written repeatedly."""

LEASE_BACKOFF_S = (1.0, 2.0, 5.0, 10.0)
"""Seconds before a node that refused a lease is asked again: after its first refusal, the second, …"""


def apply_observation(
    record: WorkflowRecord, plan: Plan, seen: LeaseObservation | VenvObservation | AttemptObservation
) -> tuple[WorkflowRecord, list[EventRecord]]:
    """Return the workflow's record after an observation of one of its attempts, and the events that report it."""
    if isinstance(seen, Leased | LeaseRefused | LeaseWaits):
        group = record.group(seen.group)
        if group.attempt != seen.attempt or group.state is not State.SCHEDULING:
            return record, []
        if isinstance(seen, Leased):
            leased = _leased(group, seen.binding, seen.at)
            nodes = {task: where.node for task, where in seen.binding.tasks.items()}
            granted = LeaseGranted(nodes=nodes, port=seen.binding.port, left_out=leased.left_out)
            return record.with_group(leased), [_event(record, seen.at, granted, group.name)]
        if isinstance(seen, LeaseWaits):
            return _announced(record, group, seen.message, seen.at)
        return _refused(record, plan, group, seen)
    key = seen.key
    group = record.group(key.group)
    if isinstance(seen, VenvProgress | VenvBuilt | VenvFailed):
        return _apply_venv(record, plan, group, seen)
    task = group.find(key.task, key.attempt)
    if task is None or task.node != key.node:
        return record, []
    if isinstance(seen, InputNotFetched | OutputLost | OutputWaits):
        return _apply_warning(record, group, task, seen)
    if isinstance(seen, Collected | CollectFailed) and seen.checkpoint is not None:
        taken, events = apply_checkpoint(record, plan.group(group.name), group, task, seen.checkpoint, seen)
        return record.with_group(taken), events
    changed, details = _task_after(group, task, seen, plan)
    if changed is task:
        return record, []
    after = record.with_group(group.with_task(changed))
    return after, [_event(record, seen.at, details, group.name, task)] if details is not None else []


def update_node_view(view: NodeView, seen: NodeUp | NodeDown) -> NodeView:
    """Return a node's view after the node was lost or found. A node counts as lost since its last message, not since now."""
    if isinstance(seen, NodeDown):
        since = seen.since or seen.at if view.up else view.since
        back_at = seen.at if view.is_engine_away and not seen.is_engine_away else view.engine_back_at
        return replace(
            view, up=False, since=since, error=seen.error, needs_action=seen.needs_action, is_engine_away=seen.is_engine_away,
            engine_back_at=back_at,
        )  # fmt: skip
    node = view.node
    return replace(
        view,
        up=True,
        since=seen.at,
        error="",
        needs_action=False,
        is_engine_away=False,
        gpus=node.usable_gpus(seen.gpus),
        reported=seen,
        machine=seen.machine,
        cpus=node.usable_cpus(seen.cpus),
        memory=node.usable_memory(seen.memory),
    )


def apply_node_observation(record: WorkflowRecord, seen: NodeUp | NodeDown) -> tuple[WorkflowRecord, list[EventRecord]]:
    """Return the workflow's record after one of the pool's nodes was lost or found, and the events that report it.

    The record stores the outage, so the next supervisor does not report it again, and can report its end.
    """
    is_news = False
    after = record
    for group in record.groups:
        for task in group.tasks:
            if record.pool_key != seen.pool or task.node != seen.node:
                continue
            away = None
            if isinstance(seen, NodeDown):
                if task.state.is_final:
                    continue
                since = task.outage.since if task.outage else seen.since or seen.at
                away = Outage(since=since, error=seen.error)
            if task.outage != away:
                is_news = True
                after = after.with_group(after.group(group.name).with_task(replace(task, outage=away)))
    if not is_news:
        return record, []
    return after, [_event(record, seen.at, node_details(seen))]


def node_details(seen: NodeUp | NodeDown) -> NodeBecameUnreachable | NodeBecameReachable:
    """Return the event's details for a node that was lost or found."""
    if isinstance(seen, NodeDown):
        return NodeBecameUnreachable(node=seen.node, error=seen.error)
    return NodeBecameReachable(node=seen.node)


def end_unstarted(group: GroupRecord, state: State, reason: Reason, message: str, at: float) -> GroupRecord:
    """Return a group that ends before any of its tasks ran, with the same end for all tasks."""
    tasks = tuple(
        replace(task, state=state, reason=reason, message=message, ended_at=at, log_complete=True) for task in group.tasks
    )
    return replace(group, state=state, reason=reason, message=message, ended_at=at, tasks=tasks)


def stop_unstarted(task: TaskRecord, why: Reason | None, at: float) -> TaskRecord:
    """Return a task that is stopped together with its group before it exists on a node."""
    is_canceled = why is Reason.CANCELED
    state, reason = (State.CANCELED, Reason.CANCELED) if is_canceled else (State.FAILED, why or Reason.PEER_FAILED)
    return replace(task, state=state, reason=reason, ended_at=at, log_complete=True)


def _leased(group: GroupRecord, binding: Binding, at: float) -> GroupRecord:
    tasks = tuple(
        replace(
            task,
            state=State.INITIALIZING,
            node=binding.tasks[task.name].node,
            gpu_ids=binding.tasks[task.name].gpu_ids,
            prepared=False,
            transfer=None,
        )
        for task in group.tasks
        if task.name in binding.tasks
    )
    left_out = tuple(task.name for task in group.tasks if task.name not in binding.tasks)
    return replace(
        group, state=State.INITIALIZING, binding=binding, tasks=tasks, left_out=left_out, initializing_at=at, message="",
        waits_for="", refusals=(),
    )  # fmt: skip


def _refused(
    record: WorkflowRecord, plan: Plan, group: GroupRecord, seen: LeaseRefused
) -> tuple[WorkflowRecord, list[EventRecord]]:
    if seen.without_venv:
        builds = {node: VenvBuild(task=task, node=node) for task, node in seen.without_venv.items()}
        group = replace(group, venv_builds=tuple(builds.values()), building_at=seen.at, waits_for="", unreachable=None)
    known = {one.node: one for one in group.refusals}
    for node, text in seen.nodes.items():
        times = known[node].times if node in known else 0
        until = seen.at + LEASE_BACKOFF_S[min(times, len(LEASE_BACKOFF_S) - 1)]
        known[node] = Refusal(node=node, message=text, until=until, times=times + 1)
    if seen.without_venv:
        return _with_message(record, replace(group, refusals=tuple(known.values())), _building_text(plan, group), seen.at)
    message = few([one.message for one in known.values()], "; ")  # each node's last refusal
    if seen.is_final:
        failed = end_unstarted(group, State.FAILED, seen.reason, message, seen.at)
        event = _event(record, seen.at, GroupCannotStart(message=message), group.name)
        return record.with_group(failed), [event]
    return _announced(record, replace(group, refusals=tuple(known.values())), message, seen.at)


def _announced(record: WorkflowRecord, group: GroupRecord, message: str, at: float) -> tuple[WorkflowRecord, list[EventRecord]]:
    waiting, details = announce_wait(group, message)
    return record.with_group(waiting), [_event(record, at, details, group.name)] if details is not None else []


def _building_text(plan: Plan, group: GroupRecord) -> str:
    venv, nodes = plan.group(group.name).venv, few([one.node for one in group.venv_builds])
    return f"building the Python environment{f' of {venv.file}' if venv else ''} on {nodes}"


def _with_message(
    record: WorkflowRecord, group: GroupRecord, message: str, at: float
) -> tuple[WorkflowRecord, list[EventRecord]]:
    after = record.with_group(replace(group, message=message))
    return after, [_event(record, at, GroupWaiting(message=message), group.name)]


def _apply_venv(
    record: WorkflowRecord, plan: Plan, group: GroupRecord, seen: VenvProgress | VenvBuilt | VenvFailed
) -> tuple[WorkflowRecord, list[EventRecord]]:
    node = seen.key.node
    if group.state is not State.SCHEDULING or group.attempt != seen.key.attempt:
        return record, []
    if all(one.node != node for one in group.venv_builds):
        return record, []
    if isinstance(seen, VenvProgress):
        where = f": {node}" if len(group.venv_builds) > 1 else ""
        message = f"{_building_text(plan, group)}{where}: {seen.message} ({seconds_text(round(seen.seconds))})"
        return record.with_group(replace(group, message=message)), []
    if isinstance(seen, VenvFailed) and seen.is_final:
        failed = end_unstarted(replace(group, venv_builds=()), State.FAILED, Reason.START_ERROR, seen.message, seen.at)
        return record.with_group(failed), [_event(record, seen.at, GroupCannotStart(message=seen.message), group.name)]
    after = without_build(group, node, seen.at)
    if isinstance(seen, VenvFailed):
        return record.with_group(after), []
    if not seen.tool:
        # The environment exists, perhaps because another workflow built it. Wait, in case the node still refuses the lease.
        return record.with_group(replace(after, not_before=seen.at + LEASE_BACKOFF_S[0])), []
    venv = plan.group(group.name).venv
    ready = VenvReady(node=node, file=venv.file if venv else "", tool=seen.tool, seconds=seen.seconds)
    return record.with_group(after), [_event(record, seen.at, ready, group.name)]


def without_build(group: GroupRecord, node: str, at: float) -> GroupRecord:
    """Return a group that no longer waits for the Python environment of a node. After the last one, it is queued again."""
    builds = tuple(one for one in group.venv_builds if one.node != node)
    if builds:
        return replace(group, venv_builds=builds)
    # The time of the builds does not count as waiting for nodes.
    spent_s = max(0.0, at - (group.building_at or at))
    return replace(group, venv_builds=(), building_at=None, scheduling_at=(group.scheduling_at or at) + spent_s)


def announce_wait(
    group: GroupRecord, message: str, unreachable: UnreachableNodes | None = None
) -> tuple[GroupRecord, GroupWaiting | None]:
    """Return a waiting group with the reason why it waits, and the event's details unless the reason was announced before.

    The reason may change back and forth every few seconds, for days. ``unreachable``: the nodes that prevent its start.
    """
    if (group.waits_for, group.unreachable) != (message, unreachable):
        group = replace(group, waits_for=message, unreachable=unreachable)
    message = f"Waiting for nodes: {message}"
    if group.message == message:
        return group, None
    announced = group.announced if group.announced_for == (group.attempt, group.scheduling_at) else ()
    waiting = replace(group, message=message)
    if message in announced:
        return waiting, None
    announced = (*announced, message)[-_ANNOUNCED:]
    waiting = replace(waiting, announced=announced, announced_for=(group.attempt, group.scheduling_at))
    return waiting, GroupWaiting(message=message)


_LEASE_LOST = (
    EndReason.START_TIMEOUT, EndReason.RELEASED, EndReason.RUNNER_DIED, EndReason.KEEPER_DIED, EndReason.BOTH_DIED,
)  # fmt: skip
"""The reasons with which runners and keepers end while they wait for the start."""

_StatusReport = (
    Staging | Prepared | PrepareFailed | Started | StopAccepted | Ended | Released | Absent
    | Collecting | Collected | CollectFailed | CollectUnanswered | LogComplete | Unanswered
)  # fmt: skip


def _task_after(  # noqa: C901  one case for each observation
    group: GroupRecord, task: TaskRecord, seen: _StatusReport, plan: Plan
) -> tuple[TaskRecord, EventDetails | None]:
    """Return the task after an observation of its attempt, and the event's details; ``None`` if there is no event."""
    match seen:
        case Prepared():
            return _prepared(task)
        case PrepareFailed():
            return _prepare_failed(task, seen)
        case Staging():
            return _staging(task, seen), None
        case Started():
            return _started(task, seen)
        case StopAccepted():
            return _stop_accepted(task, seen)
        case Ended():
            return _ended(group, task, seen, plan.group(group.name).launch(task.name).exit_actions)
        case Released():
            return _lease_released(task, seen.at) if task.state is State.INITIALIZING else (task, None)
        case Absent():
            return _absent(task, seen)
        case LogComplete():
            return (task if task.log_complete else replace(task, log_complete=True)), None
        case Collecting():
            return _collecting(task, seen), None
        case Collected():
            return _collected(task, seen)
        case CollectFailed():
            return _collect_failed(task, seen), None
        case Unanswered() | CollectUnanswered():
            return task, None


def _prepared(task: TaskRecord) -> tuple[TaskRecord, EventDetails | None]:
    if task.state is not State.INITIALIZING or task.prepared:
        return task, None
    return replace(task, prepared=True, transfer=None), TaskReady(node=task.node)


def _staging(task: TaskRecord, seen: Staging) -> TaskRecord:
    if task.state is not State.INITIALIZING or task.prepared:
        return task
    moved = TransferProgress(sent=seen.sent, total=seen.total, bytes_per_s=seen.bytes_per_s, at=seen.at, image=seen.image)
    return replace(task, transfer=moved)


def _prepare_failed(task: TaskRecord, seen: PrepareFailed) -> tuple[TaskRecord, EventDetails | None]:
    if task.state is not State.INITIALIZING:
        return task, None
    # The attempt's runner and keeper may still wait on the node. Their end is reported after they are stopped.
    reason = Reason.IMAGE_PULL if seen.is_image else Reason.DATA if seen.is_data else Reason.START_ERROR
    return replace(task, reason=reason, message=seen.message), TaskCannotStart(message=seen.message)


def _started(task: TaskRecord, seen: Started) -> tuple[TaskRecord, EventDetails | None]:
    # If a task was adopted while its node was unreachable, its start time and process id are not known yet.
    is_unknown = task.state in (State.RUNNING, State.STOPPING) and task.started_at is None
    if not (is_unknown or task.state is State.INITIALIZING):
        return task, None
    running = replace(
        task,
        state=task.state if is_unknown else State.RUNNING,
        pid=seen.pid,
        started_at=seen.started_at if seen.clock is None else seen.clock.ours(seen.started_at),
        output_dir=f"{seen.directory}/output" if seen.directory else None,
    )
    return running, TaskStarted(node=task.node, pid=seen.pid, ranks=task.ranks)


def _stop_accepted(task: TaskRecord, seen: StopAccepted) -> tuple[TaskRecord, EventDetails | None]:
    if task.orphan is OrphanState.UNREACHABLE:
        return replace(task, orphan=OrphanState.STOPPING), OrphanStopping(node=task.node)
    if task.state not in (State.INITIALIZING, State.RUNNING, State.STOPPING):
        return task, None
    grace_s = task.grace_s if seen.grace_s is None else seen.grace_s
    if task.state is State.STOPPING and task.grace_s == grace_s:
        return task, None
    return replace(task, state=State.STOPPING, grace_s=grace_s), None


def _ended(group: GroupRecord, task: TaskRecord, seen: Ended, actions: ExitActions) -> tuple[TaskRecord, EventDetails | None]:
    if task.orphan is not None:
        return _orphan_gone(task)
    if task.state.is_final:
        return task, None
    end = end_from(dict(seen.end), seen.at, seen.clock)
    was_waiting = task.state is State.INITIALIZING and group.state is State.INITIALIZING
    if was_waiting and end.started_at is None and end.reason in _LEASE_LOST:
        # The command never ran. If no other task has started, the gang releases its leases and queues again.
        return replace(task, reason=Reason.START_TIMEOUT, prepared=False), LeaseLost()
    if task.reason in CANNOT_START:
        ended = replace(task, state=State.FAILED, ended_at=end.ended_at, end=end)
    else:
        ended = conclude(task, group, end)
    # A task that cannot start stops the other tasks, so exit actions cannot make the group succeed.
    if task.reason not in CANNOT_START or len(group.tasks) == 1:
        ended = by_exit_actions(ended, actions)
    ended = replace(ended, has_files=seen.has_files)
    return ended, TaskStatus(status=ended.status, message=ended.message)


def _lease_released(task: TaskRecord, at: float) -> tuple[TaskRecord, EventDetails | None]:
    if task.reason in CANNOT_START:
        # This failure ends the group, so the task keeps its reason when its lease is released.
        failed = replace(task, state=State.FAILED, ended_at=at, log_complete=True)
        return failed, TaskStatus(status=failed.status, message=task.message)
    back = replace(task, state=State.SCHEDULING, reason=None, node=None, gpu_ids=(), outage=None, prepared=False, transfer=None)
    return back, None


def _orphan_gone(task: TaskRecord) -> tuple[TaskRecord, EventDetails | None]:
    return replace(task, orphan=None), OrphanGone(node=task.node)


def _absent(task: TaskRecord, seen: Absent) -> tuple[TaskRecord, EventDetails | None]:
    if task.orphan is not None:
        return _orphan_gone(task)
    if task.state is State.INITIALIZING:
        return _lease_released(task, seen.at)
    if task.state.is_final:
        return (task, None) if task.log_complete else (replace(task, log_complete=True), None)
    details = AttemptForgotten(node=task.node)
    message = event_text(details, group=None, task=None)
    gone = replace(task, state=State.FAILED, reason=Reason.INTERNAL, message=message, ended_at=seen.at, log_complete=True)
    return gone, details


def _collecting(task: TaskRecord, seen: Collecting) -> TaskRecord:
    if task.saved is not None or seen.checkpoint is not None:
        return task
    verb = "sends" if seen.is_packed else "packs"
    moved = TransferProgress(sent=seen.done, total=seen.total, bytes_per_s=seen.bytes_per_s, at=seen.at, output=verb)
    return replace(task, transfer=moved)


def _collected(task: TaskRecord, seen: Collected) -> tuple[TaskRecord, EventDetails | None]:
    if task.saved is not None:
        return task, None
    saved = replace(task, saved=Saved(at=seen.at, digest=seen.digest, size=seen.size), transfer=None)
    return saved, OutputCollected(size=seen.size, is_everywhere=seen.is_everywhere, left_out=seen.left_out)


def _collect_failed(task: TaskRecord, seen: CollectFailed) -> TaskRecord:
    if task.saved is not None:
        return task
    return replace(task, saved=Saved(at=seen.at, error=seen.message), transfer=None)


def _apply_warning(
    record: WorkflowRecord, group: GroupRecord, task: TaskRecord, seen: InputNotFetched | OutputLost | OutputWaits
) -> tuple[WorkflowRecord, list[EventRecord]]:
    """Return the record after a problem that does not change the task itself, and the events that report it."""
    if isinstance(seen, InputNotFetched):
        return apply_input_not_fetched(record, seen)
    details = OutputLosing(node=task.node) if isinstance(seen, OutputLost) else OutputHeldBack(node=task.node)
    return record, [_event(record, seen.at, details, group.name, task)]


def _event(
    record: WorkflowRecord, at: float, details: EventDetails, group: str | None = None, task: TaskRecord | None = None
) -> EventRecord:
    return EventRecord(
        at=at, details=details, workflow=record.uuid, group=group, task=task.name if task else None,
        attempt=task.attempt if task else None,
    )  # fmt: skip


def adjust_times(record: WorkflowRecord, plan: Plan, now: float) -> WorkflowRecord:
    """Return the record with each time limited to the latest value that is possible at ``now``."""
    groups = tuple(
        group if group.state.is_final else _adjust_group(group, plan.group(group.name).retry.wait_s(group.attempt), now)
        for group in record.groups
    )
    return replace(record, groups=groups, cancel=adjust_cancel_time(record.cancel, None, now))


def adjust_cancel_time(request: CancelRequest | None, known: CancelRequest | None, now: float) -> CancelRequest | None:
    """Return a cancel request whose time is not later than the time at which this supervisor first read it."""
    if request is None:
        return None
    return replace(request, at=known.at if known is not None else min(request.at, now))


def _adjust_group(group: GroupRecord, backoff_s: float, now: float) -> GroupRecord:
    # A rescheduled group begins to wait for nodes only after its backoff.
    backoff_until = min(group.backoff_until, now + backoff_s)
    return replace(
        group,
        scheduling_at=_earlier(group.scheduling_at, max(now, backoff_until)),
        initializing_at=_earlier(group.initializing_at, now),
        running_at=_earlier(group.running_at, now),
        stopping_at=_earlier(group.stopping_at, now),
        not_before=min(group.not_before, now + 1.0),
        backoff_until=backoff_until,
        refusals=tuple(replace(one, until=min(one.until, now + LEASE_BACKOFF_S[-1])) for one in group.refusals),
        transfer_results=tuple(replace(one, at=min(one.at, now)) for one in group.transfer_results),
        checkpoints=tuple(replace(one, at=min(one.at, now)) for one in group.checkpoints),
        tasks=tuple(_adjust_task(task, now) for task in group.tasks),
    )


def _adjust_task(task: TaskRecord, now: float) -> TaskRecord:
    return replace(
        task,
        started_at=_earlier(task.started_at, now),
        ended_at=_earlier(task.ended_at, now),
        outage=task.outage and replace(task.outage, since=min(task.outage.since, now)),
        transfer=task.transfer and replace(task.transfer, at=min(task.transfer.at, now)),
        saved=task.saved and replace(task.saved, at=min(task.saved.at, now)),
    )


def _earlier(at: float | None, now: float) -> float | None:
    return None if at is None else min(at, now)
