"""A workflow's state, as it follows from its groups'. Pure."""

from __future__ import annotations

from dataclasses import replace

from distflow.lifecycle.rollup import roll_up_workflow
from distflow.lifecycle.states import WorkflowState
from distflow.state.record import WorkflowRecord

__all__ = ["roll_up"]


def roll_up(record: WorkflowRecord, now: float) -> WorkflowRecord:
    """Return the workflow with the state that its groups give it; the same where nothing changes."""
    if record.state.is_final:
        return record
    # Groups that an earlier workflow ran say nothing of whether this one has begun.
    states = [(group.state, group.reason) for group in record.groups if group.kept is None]
    state, reason = roll_up_workflow(states)
    if state is WorkflowState.PENDING or (state, reason) == (record.state, record.reason):
        return record
    after = replace(record, state=state, reason=reason)
    if record.started_at is None:
        started = [group.running_at for group in record.groups if group.running_at is not None]
        after = replace(after, started_at=min(started) if started else None)
    if state.is_final:
        after = replace(after, ended_at=max((group.ended_at or now for group in record.groups), default=now))
    return after
