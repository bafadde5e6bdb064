"""The tasks of a group in their initial state."""

from __future__ import annotations

from distflow.lifecycle.states import State
from distflow.plan.model import GroupPlan
from distflow.state.record import TaskRecord

__all__ = ["fresh_tasks"]


def fresh_tasks(plan: GroupPlan, attempt: int = 0, state: State = State.WAITING) -> tuple[TaskRecord, ...]:
    """Return every task of a group in its state at the start of an attempt."""
    return tuple(
        TaskRecord(
            name=launch.task, lead=launch.lead, attempt=attempt, state=state, ranks=launch.ranks.text if launch.ranks else "",
            outputs=launch.outputs,
        )
        for launch in plan.launches
    )  # fmt: skip
