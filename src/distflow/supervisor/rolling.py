"""Compute a workflow's state from the states of its groups. Pure."""

from __future__ import annotations

from dataclasses import replace

from distflow.lifecycle.rollup import roll_up_workflow
from distflow.lifecycle.states import WorkflowState
from distflow.state.record import WorkflowRecord

__all__ = ["roll_up"]


def roll_up(record: WorkflowRecord, now: float) -> WorkflowRecord:
    """Return the workflow with the state that follows from its groups; the same object if nothing changes."""
    if record.state.is_final:
        return record
    # Groups that an earlier workflow ran do not show whether this one has begun.
    states = [(group.state, group.reason) for group in record.groups if group.kept is None]
    state, reason = roll_up_workflow(states)
    started_at = record.started_at
    if started_at is None:
        started_at = min((group.running_at for group in record.groups if group.running_at is not None), default=None)
    # A group that ended without having run shows that its workflow is active; another group shows when it began.
    if state is WorkflowState.PENDING or (state, reason, started_at) == (record.state, record.reason, record.started_at):
        return record
    after = replace(record, state=state, reason=reason, started_at=started_at)
    if state.is_final:
        after = replace(after, ended_at=max((group.ended_at or now for group in record.groups), default=now))
    return after
