"""Adjust the times of a stored record to the clock of the supervisor that continues it. Pure.

Times in records must survive a reboot, so they are wall-clock times. If the machine's clock was set back after they were
written, they are in the future. Every wait that is counted from them would then last longer by the same amount.
"""

from __future__ import annotations

from dataclasses import replace

from distflow.plan.model import Plan
from distflow.state.record import CancelRequest, GroupRecord, TaskRecord, WorkflowRecord
from distflow.supervisor.observations import LEASE_BACKOFF_S

__all__ = ["in_our_time", "request_in_our_time"]


def in_our_time(record: WorkflowRecord, plan: Plan, now: float) -> WorkflowRecord:
    """Return the record without times that are later than they can be at ``now``."""
    groups = tuple(
        group if group.state.is_final else _group(group, plan.group(group.name).retry.wait_s(group.attempt), now)
        for group in record.groups
    )
    return replace(record, groups=groups, cancel=request_in_our_time(record.cancel, None, now))


def request_in_our_time(request: CancelRequest | None, known: CancelRequest | None, now: float) -> CancelRequest | None:
    """Return a cancel request with the time at which this supervisor learned of it, if its own time is later."""
    if request is None:
        return None
    return replace(request, at=known.at if known is not None else min(request.at, now))


def _group(group: GroupRecord, rest_s: float, now: float) -> GroupRecord:
    # A rescheduled group begins to wait for nodes only after its backoff.
    rests_until = min(group.resting_until, now + rest_s)
    return replace(
        group,
        scheduling_at=_earlier(group.scheduling_at, max(now, rests_until)),
        initializing_at=_earlier(group.initializing_at, now),
        running_at=_earlier(group.running_at, now),
        stopping_at=_earlier(group.stopping_at, now),
        not_before=min(group.not_before, now + 1.0),
        resting_until=rests_until,
        refusals=tuple(replace(one, until=min(one.until, now + LEASE_BACKOFF_S[-1])) for one in group.refusals),
        carried=tuple(replace(one, at=min(one.at, now)) for one in group.carried),
        checkpoints=tuple(replace(one, at=min(one.at, now)) for one in group.checkpoints),
        tasks=tuple(_task(task, now) for task in group.tasks),
    )


def _task(task: TaskRecord, now: float) -> TaskRecord:
    return replace(
        task,
        started_at=_earlier(task.started_at, now),
        ended_at=_earlier(task.ended_at, now),
        out_of_reach=task.out_of_reach and replace(task.out_of_reach, since=min(task.out_of_reach.since, now)),
        transfer=task.transfer and replace(task.transfer, at=min(task.transfer.at, now)),
        saved=task.saved and replace(task.saved, at=min(task.saved.at, now)),
    )


def _earlier(at: float | None, now: float) -> float | None:
    return None if at is None else min(at, now)
