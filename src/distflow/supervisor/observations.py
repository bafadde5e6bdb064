"""Apply observations to the records, one at a time, and adjust the times of stored records to the current clock.

Observations may come late, twice or out of order, because a reconnection repeats the node's reports. Each is applied only if
it is still valid: for example, an attempt that has ended does not start again. This module does no I/O.

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
    record: WorkflowRecord, plan: Plan, observation: LeaseObservation | VenvObservation | AttemptObservation
) -> tuple[WorkflowRecord, list[EventRecord]]:
    """Return the workflow's record after an observation of one of its attempts, and the events that report it."""
    if isinstance(observation, Leased | LeaseRefused | LeaseWaits):
        group = record.group(observation.group)
        if group.attempt != observation.attempt or group.state is not State.SCHEDULING:
            return record, []
        if isinstance(observation, Leased):
            leased = _leased(group, observation.binding, observation.at)
            nodes = {task: where.node for task, where in observation.binding.tasks.items()}
            granted = LeaseGranted(nodes=nodes, port=observation.binding.port, left_out=leased.left_out)
            return record.with_group(leased), [_event(record, observation.at, granted, group.name)]
        if isinstance(observation, LeaseWaits):
            return _announced(record, group, observation.message, observation.at)
        return _refused(record, plan, group, observation)
    key = observation.key
    group = record.group(key.group)
    if isinstance(observation, VenvProgress | VenvBuilt | VenvFailed):
        return _apply_venv(record, plan, group, observation)
    task = group.find(key.task, key.attempt)
    if task is None or task.node != key.node:
        return record, []
    if isinstance(observation, InputNotFetched | OutputLost | OutputWaits):
        return _apply_warning(record, group, task, observation)
    if isinstance(observation, Collected | CollectFailed) and observation.checkpoint is not None:
        taken, events = apply_checkpoint(record, plan.group(group.name), group, task, observation.checkpoint, observation)
        return record.with_group(taken), events
    changed, details = _task_after(group, task, observation, plan)
    if changed is task:
        return record, []
    after = record.with_group(group.with_task(changed))
    return after, [_event(record, observation.at, details, group.name, task)] if details is not None else []


def update_node_view(view: NodeView, observation: NodeUp | NodeDown) -> NodeView:
    """Return a node's view after it became unreachable or reachable. An outage begins at the node's last message, not now."""
    if isinstance(observation, NodeDown):
        since = observation.since or observation.at if view.up else view.since
        back_at = observation.at if view.is_engine_away and not observation.is_engine_away else view.engine_back_at
        return replace(
            view, up=False, since=since, error=observation.error, needs_action=observation.needs_action,
            is_engine_away=observation.is_engine_away, engine_back_at=back_at,
        )  # fmt: skip
    node = view.node
    return replace(
        view,
        up=True,
        since=observation.at,
        error="",
        needs_action=False,
        is_engine_away=False,
        gpus=node.usable_gpus(observation.gpus),
        reported=observation,
        lease_directory_id=observation.lease_directory_id,
        cpus=node.usable_cpus(observation.cpus),
        memory=node.usable_memory(observation.memory),
    )


def apply_node_observation(record: WorkflowRecord, observation: NodeUp | NodeDown) -> tuple[WorkflowRecord, list[EventRecord]]:
    """Return the workflow's record after a node of the pool became unreachable or reachable, and the events that report it.

    The record stores the outage, so the next supervisor does not report it again, and can report its end.
    """
    is_news = False
    after = record
    for group in record.groups:
        for task in group.tasks:
            if record.pool_key != observation.pool or task.node != observation.node:
                continue
            away = None
            if isinstance(observation, NodeDown):
                if task.state.is_final:
                    continue
                since = task.outage.since if task.outage else observation.since or observation.at
                away = Outage(since=since, error=observation.error)
            if task.outage != away:
                is_news = True
                after = after.with_group(after.group(group.name).with_task(replace(task, outage=away)))
    if not is_news:
        return record, []
    return after, [_event(record, observation.at, node_details(observation))]


def node_details(observation: NodeUp | NodeDown) -> NodeBecameUnreachable | NodeBecameReachable:
    """Return the event's details for a node that became unreachable or reachable."""
    if isinstance(observation, NodeDown):
        return NodeBecameUnreachable(node=observation.node, error=observation.error)
    return NodeBecameReachable(node=observation.node)


def end_unstarted(group: GroupRecord, state: State, reason: Reason, message: str, at: float) -> GroupRecord:
    """Return a group that ends before any of its tasks ran, with the same end for all tasks."""
    tasks = tuple(
        replace(task, state=state, reason=reason, message=message, ended_at=at, log_complete=True) for task in group.tasks
    )
    return replace(group, state=state, reason=reason, message=message, ended_at=at, tasks=tasks)


def stop_unstarted(task: TaskRecord, why: Reason | None, at: float) -> TaskRecord:
    """Return the end of a task that has no lease when its group is stopped."""
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
    record: WorkflowRecord, plan: Plan, group: GroupRecord, observation: LeaseRefused
) -> tuple[WorkflowRecord, list[EventRecord]]:
    if observation.without_venv:
        builds = {node: VenvBuild(task=task, node=node) for task, node in observation.without_venv.items()}
        group = replace(group, venv_builds=tuple(builds.values()), building_at=observation.at, waits_for="", unreachable=None)
    known = {one.node: one for one in group.refusals}
    for node, text in observation.nodes.items():
        times = known[node].times if node in known else 0
        until = observation.at + LEASE_BACKOFF_S[min(times, len(LEASE_BACKOFF_S) - 1)]
        known[node] = Refusal(node=node, message=text, until=until, times=times + 1)
    if observation.without_venv:
        return _with_message(
            record, replace(group, refusals=tuple(known.values())), _building_text(plan, group), observation.at
        )
    message = few([one.message for one in known.values()], "; ")  # each node's last refusal
    if observation.is_final:
        failed = end_unstarted(group, State.FAILED, observation.reason, message, observation.at)
        event = _event(record, observation.at, GroupCannotStart(message=message), group.name)
        return record.with_group(failed), [event]
    return _announced(record, replace(group, refusals=tuple(known.values())), message, observation.at)


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
    record: WorkflowRecord, plan: Plan, group: GroupRecord, observation: VenvProgress | VenvBuilt | VenvFailed
) -> tuple[WorkflowRecord, list[EventRecord]]:
    node = observation.key.node
    if group.state is not State.SCHEDULING or group.attempt != observation.key.attempt:
        return record, []
    if all(one.node != node for one in group.venv_builds):
        return record, []
    if isinstance(observation, VenvProgress):
        where = f": {node}" if len(group.venv_builds) > 1 else ""
        message = f"{_building_text(plan, group)}{where}: {observation.message} ({seconds_text(round(observation.seconds))})"
        return record.with_group(replace(group, message=message)), []
    if isinstance(observation, VenvFailed) and observation.is_final:
        failed = end_unstarted(
            replace(group, venv_builds=()), State.FAILED, Reason.START_ERROR, observation.message, observation.at
        )
        return record.with_group(failed), [
            _event(record, observation.at, GroupCannotStart(message=observation.message), group.name)
        ]
    after = without_build(group, node, observation.at)
    if isinstance(observation, VenvFailed):
        return record.with_group(after), []
    if not observation.tool:
        # The environment exists, perhaps because another workflow built it. Wait, in case the node still refuses the lease.
        return record.with_group(replace(after, not_before=observation.at + LEASE_BACKOFF_S[0])), []
    venv = plan.group(group.name).venv
    ready = VenvReady(node=node, file=venv.file if venv else "", tool=observation.tool, seconds=observation.seconds)
    return record.with_group(after), [_event(record, observation.at, ready, group.name)]


def without_build(group: GroupRecord, node: str, at: float) -> GroupRecord:
    """Return a group that no longer waits for a node's Python environment. After its last build, the group is queued again."""
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
    group: GroupRecord, task: TaskRecord, observation: _StatusReport, plan: Plan
) -> tuple[TaskRecord, EventDetails | None]:
    """Return the task after an observation of its attempt, and the event's details; ``None`` if there is no event."""
    match observation:
        case Prepared():
            return _prepared(task)
        case PrepareFailed():
            return _prepare_failed(task, observation)
        case Staging():
            return _staging(task, observation), None
        case Started():
            return _started(task, observation)
        case StopAccepted():
            return _stop_accepted(task, observation)
        case Ended():
            return _ended(group, task, observation, plan.group(group.name).launch(task.name).exit_actions)
        case Released():
            return _lease_released(task, observation.at) if task.state is State.INITIALIZING else (task, None)
        case Absent():
            return _absent(task, observation)
        case LogComplete():
            return (task if task.log_complete else replace(task, log_complete=True)), None
        case Collecting():
            return _collecting(task, observation), None
        case Collected():
            return _collected(task, observation)
        case CollectFailed():
            return _collect_failed(task, observation), None
        case Unanswered() | CollectUnanswered():
            return task, None


def _prepared(task: TaskRecord) -> tuple[TaskRecord, EventDetails | None]:
    if task.state is not State.INITIALIZING or task.prepared:
        return task, None
    return replace(task, prepared=True, transfer=None), TaskReady(node=task.node)


def _staging(task: TaskRecord, observation: Staging) -> TaskRecord:
    if task.state is not State.INITIALIZING or task.prepared:
        return task
    moved = TransferProgress(
        sent=observation.sent,
        total=observation.total,
        bytes_per_s=observation.bytes_per_s,
        at=observation.at,
        image=observation.image,
    )
    return replace(task, transfer=moved)


def _prepare_failed(task: TaskRecord, observation: PrepareFailed) -> tuple[TaskRecord, EventDetails | None]:
    if task.state is not State.INITIALIZING:
        return task, None
    # The attempt's runner and keeper may still wait on the node. Their end is reported after they are stopped.
    reason = Reason.IMAGE_PULL if observation.is_image else Reason.DATA if observation.is_data else Reason.START_ERROR
    return replace(task, reason=reason, message=observation.message), TaskCannotStart(message=observation.message)


def _started(task: TaskRecord, observation: Started) -> tuple[TaskRecord, EventDetails | None]:
    # If a task was adopted while its node was unreachable, its start time and process id are not known yet.
    is_unknown = task.state in (State.RUNNING, State.STOPPING) and task.started_at is None
    if not (is_unknown or task.state is State.INITIALIZING):
        return task, None
    running = replace(
        task,
        state=task.state if is_unknown else State.RUNNING,
        pid=observation.pid,
        started_at=observation.started_at if observation.clock is None else observation.clock.ours(observation.started_at),
        output_dir=f"{observation.directory}/output" if observation.directory else None,
    )
    return running, TaskStarted(node=task.node, pid=observation.pid, ranks=task.ranks)


def _stop_accepted(task: TaskRecord, observation: StopAccepted) -> tuple[TaskRecord, EventDetails | None]:
    if task.orphan is OrphanState.UNREACHABLE:
        return replace(task, orphan=OrphanState.STOPPING), OrphanStopping(node=task.node)
    if task.state not in (State.INITIALIZING, State.RUNNING, State.STOPPING):
        return task, None
    grace_s = task.grace_s if observation.grace_s is None else observation.grace_s
    if task.state is State.STOPPING and task.grace_s == grace_s:
        return task, None
    return replace(task, state=State.STOPPING, grace_s=grace_s), None


def _ended(
    group: GroupRecord, task: TaskRecord, observation: Ended, actions: ExitActions
) -> tuple[TaskRecord, EventDetails | None]:
    if task.orphan is not None:
        return _orphan_gone(task)
    if task.state.is_final:
        return task, None
    end = end_from(dict(observation.end), observation.at, observation.clock)
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
    ended = replace(ended, has_files=observation.has_files)
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


def _absent(task: TaskRecord, observation: Absent) -> tuple[TaskRecord, EventDetails | None]:
    if task.orphan is not None:
        return _orphan_gone(task)
    if task.state is State.INITIALIZING:
        return _lease_released(task, observation.at)
    if task.state.is_final:
        return (task, None) if task.log_complete else (replace(task, log_complete=True), None)
    details = AttemptForgotten(node=task.node)
    message = event_text(details, group=None, task=None)
    gone = replace(
        task, state=State.FAILED, reason=Reason.INTERNAL, message=message, ended_at=observation.at, log_complete=True
    )
    return gone, details


def _collecting(task: TaskRecord, observation: Collecting) -> TaskRecord:
    if task.saved is not None or observation.checkpoint is not None:
        return task
    step = "sends" if observation.is_packed else "packs"
    moved = TransferProgress(
        sent=observation.done, total=observation.total, bytes_per_s=observation.bytes_per_s, at=observation.at, output=step
    )
    return replace(task, transfer=moved)


def _collected(task: TaskRecord, observation: Collected) -> tuple[TaskRecord, EventDetails | None]:
    if task.saved is not None:
        return task, None
    saved = replace(task, saved=Saved(at=observation.at, digest=observation.digest, size=observation.size), transfer=None)
    return saved, OutputCollected(size=observation.size, is_everywhere=observation.is_everywhere, left_out=observation.left_out)


def _collect_failed(task: TaskRecord, observation: CollectFailed) -> TaskRecord:
    if task.saved is not None:
        return task
    return replace(task, saved=Saved(at=observation.at, error=observation.message), transfer=None)


def _apply_warning(
    record: WorkflowRecord, group: GroupRecord, task: TaskRecord, observation: InputNotFetched | OutputLost | OutputWaits
) -> tuple[WorkflowRecord, list[EventRecord]]:
    """Return the record after a problem that does not change the task itself, and the events that report it."""
    if isinstance(observation, InputNotFetched):
        return apply_input_not_fetched(record, observation)
    details = OutputLosing(node=task.node) if isinstance(observation, OutputLost) else OutputHeldBack(node=task.node)
    return record, [_event(record, observation.at, details, group.name, task)]


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
        not_before=min(group.not_before, now + LEASE_BACKOFF_S[0]),
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
