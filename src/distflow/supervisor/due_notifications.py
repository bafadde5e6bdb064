"""Find the notifications that a decision makes due. The loop stores them, and another process sends them.

This module does no I/O.
"""

from __future__ import annotations

from collections.abc import Iterator

from distflow.documents.notify import NotifyTarget, Trigger
from distflow.lifecycle.states import State, WorkflowState
from distflow.state.notification import Notification
from distflow.state.record import WorkflowRecord

__all__ = ["due_notifications", "next_wait_notification"]

_ENDS = {
    WorkflowState.COMPLETED: Trigger.COMPLETED,
    WorkflowState.FAILED: Trigger.FAILED,
    WorkflowState.CANCELED: Trigger.CANCELED,
}


def due_notifications(
    targets: tuple[NotifyTarget, ...], before: WorkflowRecord, after: WorkflowRecord, since: float, now: float
) -> Iterator[Notification]:
    """Yield the notifications that a step from ``before`` to ``after`` makes due.

    A wait is reported by the first decision after the target's ``after_s`` has passed. ``since`` is the time of the previous
    decision, or infinite if that time is not known. A wait may then be yielded again, and the store ignores the duplicate.
    """
    triggers = set()
    if before.started_at is None and after.started_at is not None:
        triggers.add(Trigger.STARTED)
    if after.state.is_final and not before.state.is_final:
        triggers.add(_ENDS[after.state])
    for position, target in enumerate(targets):
        for trigger in target.on:
            if trigger in triggers:
                yield Notification(workflow=after.uuid, target=position, on=trigger, at=now)
        for subject, due_at in _waits(target, after):
            if due_at <= now and not due_at <= since <= now:
                yield Notification(workflow=after.uuid, target=position, on=Trigger.WAITING, subject=subject, at=now)


def next_wait_notification(targets: tuple[NotifyTarget, ...], record: WorkflowRecord, now: float) -> float | None:
    """Return the time at which the next wait must be reported if nothing changes; ``None`` if no wait must be reported."""
    times = (due_at for target in targets for _, due_at in _waits(target, record) if due_at > now)
    return min(times, default=None)


def _waits(target: NotifyTarget, record: WorkflowRecord) -> Iterator[tuple[str, float]]:
    """Yield each group that waits for nodes, with its attempt and the time at which the wait must be reported.

    A group that waits for Python environments is not included.
    """
    if Trigger.WAITING in target.on:
        for group in record.groups:
            # The time of the builds is added to `scheduling_at` when they end.
            if group.state is State.SCHEDULING and group.scheduling_at is not None and not group.venv_builds:
                yield f"{group.name}/{group.attempt}", group.scheduling_at + target.after_s
