"""Checkpoints: directories of running tasks, saved at intervals and at the end, and given to the next attempt.

The node packs a checkpoint, the supervisor fetches it (``PackCheckpoint``) and writes it to its URL. The last complete archive
stays in the blob store until the workflow has ended, and a retried group gets it from there. A failed checkpoint is reported,
and it never ends a training: the next checkpoint is another try. This module does no I/O.

A directory that a group shares is saved from each task in the same way. It is saved only while the group may be retried, and it
is not written to a URL. Every task of the next attempt gets the archives of all tasks, with the lead's files on top.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import PurePosixPath

from msgspec import Struct

from distflow.backends.base import AttemptKey, CheckpointRef, Collected, CollectFailed
from distflow.lifecycle.states import Reason, State
from distflow.plan.model import BoundLaunch, GroupPlan, Plan, PlannedCheckpoint, PlannedFile
from distflow.state.event_details import CheckpointFailed, CheckpointFilesLeftOut, CheckpointWritten, EventDetails
from distflow.state.record import CheckpointRecord, DataKind, DataRef, EventRecord, GroupRecord, TaskRecord, WorkflowRecord
from distflow.structs import replace
from distflow.supervisor.commands import PackCheckpoint, TransferData, TransferEnded, TransferMoved
from distflow.supervisor.snapshot import NodeView
from distflow.supervisor.transfers import Transfer, apply_data, fetch_transfer, write_transfer

__all__ = [
    "CANCELED_S",
    "DueCheckpoints",
    "add_checkpoints",
    "apply_checkpoint",
    "apply_transfer",
    "checkpoint_differences",
    "checkpoint_path",
    "due_checkpoints",
    "transfer_of",
]


CANCELED_S = 60.0
"""Seconds that a canceled group waits, after its tasks have ended, for their last checkpoints. Then it abandons them."""


class DueCheckpoints(Struct, frozen=True, kw_only=True):
    """The work that is due for a group's checkpoints."""

    packs: tuple[tuple[TaskRecord, CheckpointRef], ...] = ()
    """Checkpoints to pack, each with its task."""
    stores: tuple[TransferData, ...] = ()
    """Checkpoints to write to their URLs."""
    wake_at: float | None = None
    """When the next checkpoint is due, or an unreachable node with an unsaved checkpoint is given up."""
    message: str = ""
    """A message about unsaved checkpoints, for a group whose tasks have all ended; empty if there are none."""


def due_checkpoints(
    plan: GroupPlan,
    record: WorkflowRecord,
    group: GroupRecord,
    node_of: Callable[[TaskRecord], NodeView | None],
    lost_after_s: float,
    now: float,
) -> DueCheckpoints:
    """Return the work that is due at ``now``.

    An ended task that has run has one last checkpoint of each directory, unless its node is unreachable for too long. A shared
    directory has one only if a task has ended without completing, and the group may be retried.
    """
    packs: list[tuple[TaskRecord, CheckpointRef]] = []
    stores: list[TransferData] = []
    times: list[float] = []
    unsaved: list[str] = []
    for task, number, planned in _planned_checkpoints(plan, group):
        if planned.is_shared and not _may_be_retried(plan, record, group):
            continue
        known = group.checkpoint(task.name, number)
        current = known if known is not None and known.attempt == task.attempt else None
        if current is not None and current.is_new:
            key = AttemptKey(workflow=record.uuid, group=group.name, task=task.name, attempt=task.attempt, node="")
            stores.append(TransferData(record.pool_key, key, DataRef(DataKind.STORE, number)))
            unsaved += [task.name] if task.state.is_final else []
        elif task.state is State.RUNNING and task.started_at is not None:
            at = max(task.started_at, current.at if current is not None else 0.0) + planned.every_s
            if now >= at:
                packs.append((task, CheckpointRef(number)))
            else:
                times.append(at)
        elif _needs_last_checkpoint(task, current) and not (planned.is_shared and _has_no_failure(group)):
            view = node_of(task)
            if view is None or view.up:
                packs.append((task, CheckpointRef(number, is_last=True)))
            elif now < (lost_at := view.lost_at(lost_after_s, now)):
                times.append(lost_at)
            else:
                continue
            unsaved.append(task.name)
    message = f"all tasks have ended; saving the last checkpoint of {', '.join(dict.fromkeys(unsaved))}" if unsaved else ""
    return DueCheckpoints(packs=tuple(packs), stores=tuple(stores), wake_at=min(times, default=None), message=message)


def checkpoint_path(plan: GroupPlan, command: PackCheckpoint) -> str:
    """Return the directory, within the attempt's directory, that holds the checkpoint."""
    return plan.launch(command.key.task).checkpoints[command.checkpoint.number].place


def _store_transfer(plan: GroupPlan, record: WorkflowRecord, command: TransferData) -> Transfer:
    """Return the transfer that writes a checkpoint to its URL."""
    key, number = command.key, command.data.number
    planned = plan.launch(key.task).checkpoints[number]
    known = record.group(key.group).checkpoint(key.task, number)
    url = planned.url.replace("{{workflow_id}}", record.id)
    return Transfer(data=command.data, url=url, regex=planned.regex, digest=known.digest if known is not None else "")


def add_checkpoints(launch: BoundLaunch, plan: GroupPlan, group: GroupRecord) -> BoundLaunch:
    """Return the launch with the last checkpoints of earlier attempts as archives to unpack."""
    files = []
    for number, planned in enumerate(plan.launch(launch.task).checkpoints):
        place = PurePosixPath(planned.place)
        # The archive comes from a node and may be unpacked on other nodes. It must not place files outside its directory,
        # such as a module that the scripts import, or distflow's own records of the attempt.
        files += [
            PlannedFile(
                path=str(place.parent), shown=f"the last checkpoint of {planned.shown}", blob=known.digest, size=known.size,
                mode=0o700, is_tar=True, within=place.name,
            )
            for known in _archives(plan, group, launch.task, number)
        ]  # fmt: skip
    # The spec's files are placed over those of a checkpoint, because they may contain addresses of this attempt.
    return replace(launch, files=(*files, *launch.files))


def checkpoint_differences(plan: GroupPlan, group: GroupRecord) -> dict[str, dict[str, int | None]]:
    """Return the directories in which tasks with ranks begin the next attempt with different files. Shared ones are left out.

    The keys are directories. The values map each task to the size of its archive in bytes, or to ``None`` without one.
    """
    ranked = [launch for launch in plan.launches if launch.ranks is not None]
    found: dict[str, dict[str, int | None]] = {}
    for shown in dict.fromkeys(one.shown for launch in ranked for one in launch.checkpoints if not one.is_shared):
        taken: dict[str, CheckpointRecord | None] = {}
        for launch in ranked:
            number = next((number for number, one in enumerate(launch.checkpoints) if one.shown == shown), None)
            taken[launch.task] = group.checkpoint(launch.task, number) if number is not None else None
        if len({one.digest if one is not None else "" for one in taken.values()}) > 1:
            found[shown] = {name: one.size if one is not None and one.digest else None for name, one in taken.items()}
    return found


def apply_checkpoint(
    record: WorkflowRecord,
    plan: GroupPlan,
    group: GroupRecord,
    task: TaskRecord,
    checkpoint: CheckpointRef,
    observation: Collected | CollectFailed,
) -> tuple[GroupRecord, list[EventRecord]]:
    """Return the group after a checkpoint was saved or failed, and the events that report it.

    A checkpoint of an earlier attempt never replaces one of a later attempt.
    """
    number = checkpoint.number
    known = group.checkpoint(task.name, number) or CheckpointRecord(task=task.name, number=number)
    is_being_written = known.is_new and known.attempt == task.attempt
    is_being_sent = task.attempt < group.attempt and group.state is State.INITIALIZING  # to the next attempt
    if is_being_written or is_being_sent or known.attempt > task.attempt:
        return group, []  # a duplicate, or a report from a node that was given up
    taken = replace(known, attempt=task.attempt, at=observation.at, is_last=checkpoint.is_last, error="")
    details: list[EventDetails] = []
    if isinstance(observation, CollectFailed):
        taken, details = (
            replace(taken, error=observation.message),
            [CheckpointFailed(is_taken=False, error=observation.message)],
        )
    elif observation.digest and (
        observation.digest != known.digest or known.error
    ):  # after an error, it may be missing at its URL
        is_shared = plan.launch(task.name).checkpoints[number].is_shared
        taken = replace(taken, digest=observation.digest, size=observation.size, is_new=not is_shared)
        if observation.left_out:
            details = [CheckpointFilesLeftOut(files=observation.left_out)]
    return group.with_checkpoint(taken), [_event(record, group, taken, observation.at, one) for one in details]


def transfer_of(plan: Plan, record: WorkflowRecord, command: TransferData) -> Transfer:
    """Return the transfer that a command asks for."""
    group = plan.group(command.key.group)
    match command.data.kind:
        case DataKind.FETCH:
            return fetch_transfer(group, record, command)
        case DataKind.WRITE:
            return write_transfer(group, record, command)
        case DataKind.STORE:
            return _store_transfer(group, record, command)


def apply_transfer(
    record: WorkflowRecord, observation: TransferMoved | TransferEnded
) -> tuple[WorkflowRecord, list[EventRecord]]:
    """Return the workflow's record after progress or the end of a transfer, and the events that report it."""
    if observation.data.kind is not DataKind.STORE:
        return apply_data(record, observation)
    return _apply_stored(record, observation) if isinstance(observation, TransferEnded) else (record, [])


def _apply_stored(record: WorkflowRecord, observation: TransferEnded) -> tuple[WorkflowRecord, list[EventRecord]]:
    """Return the workflow's record after a checkpoint was written to its URL or could not be written."""
    group = record.group(observation.key.group)
    known = group.checkpoint(observation.key.task, observation.data.number)
    if known is None or not known.is_new or known.attempt != observation.key.attempt:
        return record, []
    stored = replace(known, at=observation.at, is_new=False, error=observation.outcome.error)
    details: EventDetails = CheckpointWritten(
        url=observation.url, files=observation.outcome.files, size=observation.outcome.content
    )
    if stored.error:
        details = CheckpointFailed(is_taken=True, error=stored.error)
    return record.with_group(group.with_checkpoint(stored)), [_event(record, group, stored, observation.at, details)]


def _planned_checkpoints(plan: GroupPlan, group: GroupRecord) -> Iterator[tuple[TaskRecord, int, PlannedCheckpoint]]:
    for task in group.tasks:
        for number, planned in enumerate(plan.launch(task.name).checkpoints):
            yield task, number, planned


def _archives(plan: GroupPlan, group: GroupRecord, task: str, number: int) -> list[CheckpointRecord]:
    """Return the archives that a task gets, in the order in which they are unpacked over one another."""
    holders = [(task, number)]
    if plan.launch(task).checkpoints[number].is_shared:
        order = [*(launch for launch in plan.launches[::-1] if not launch.lead), plan.lead]
        holders = [(one.task, at) for one in order for at, other in enumerate(one.checkpoints) if other.is_shared]
    found: dict[str, CheckpointRecord] = {}
    for name, at in holders:
        known = group.checkpoint(name, at)
        if known is not None and known.digest:
            found.pop(known.digest, None)
            found[known.digest] = known
    return list(found.values())


def _may_be_retried(plan: GroupPlan, record: WorkflowRecord, group: GroupRecord) -> bool:
    is_left = record.cancel is None and group.attempt < plan.retry.limit
    return is_left and any(launch.exit_actions.reschedule for launch in plan.launches)


def _has_no_failure(group: GroupRecord) -> bool:
    """Return whether every ended task has completed. Then no further attempt is expected."""
    return all(task.state is State.COMPLETED for task in group.tasks if task.state.is_final)


def _needs_last_checkpoint(task: TaskRecord, known: CheckpointRecord | None) -> bool:
    has_run = task.state.is_final and task.started_at is not None and task.node is not None
    # A lost task without `end` was given up. With `end`, its node is reachable again after a reboot or a long outage.
    is_gone = task.reason is Reason.NODE_LOST and task.end is None
    return has_run and not is_gone and not (known is not None and known.is_last)


def _event(
    record: WorkflowRecord, group: GroupRecord, about: CheckpointRecord, at: float, details: EventDetails
) -> EventRecord:
    return EventRecord(at=at, details=details, workflow=record.uuid, group=group.name, task=about.task, attempt=about.attempt)
