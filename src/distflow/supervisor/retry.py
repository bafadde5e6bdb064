"""Retry a failed group if the exit actions of the first failed task say so. Pure.

A retry always restarts the whole gang: the ranks of a world cannot continue with a new member, and tasks without a world have
each other's addresses. Each attempt is new for nodes and clocks: it gets new leases, and its timeouts start again.
"""

from __future__ import annotations

from dataclasses import replace

from distflow.documents.quantities import seconds_text
from distflow.lifecycle.exits import Action, action_of
from distflow.lifecycle.states import State
from distflow.plan.model import GroupPlan
from distflow.state.fresh import fresh_tasks
from distflow.state.record import Cause, GroupRecord
from distflow.supervisor.carrying import kept

__all__ = ["is_rescheduled", "try_again"]


def is_rescheduled(plan: GroupPlan, group: GroupRecord, cause: Cause) -> bool:
    """Return whether the spec asks for another attempt after this failure, regardless of the number of attempts."""
    actions, has_run = plan.launch(cause.task).exit_actions, group.task(cause.task).started_at is not None
    return action_of(actions, cause.reason, cause.exit_code, cause.signal, has_run=has_run) is Action.RESCHEDULE


def try_again(plan: GroupPlan, group: GroupRecord, cause: Cause, now: float) -> GroupRecord | None:
    """Return an ended group as it waits for its next attempt; ``None`` after its last one."""
    if group.attempt >= plan.retry.limit:
        return None
    attempt = group.attempt + 1
    wait_s = plan.retry.wait_s(attempt)
    return GroupRecord(
        name=group.name,
        upstream=group.upstream,
        state=State.SCHEDULING,
        message=f"attempt {attempt + 1} of at most {plan.retry.limit + 1} begins in {seconds_text(wait_s)}",
        attempt=attempt,
        carried=kept(group),
        checkpoints=group.checkpoints,
        earlier=(*group.earlier, *(replace(task, state=State.RESCHEDULED) for task in group.tasks)),
        earlier_causes=(*group.earlier_causes, cause),
        tasks=fresh_tasks(plan, attempt, State.SCHEDULING),
        # The backoff does not count as waiting for nodes.
        scheduling_at=now + wait_s,
        resting_until=now + wait_s,
    )
