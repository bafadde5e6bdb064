"""``decide(snapshot, now) → decision``: the whole policy of gangs, in one pure function over frozen records.

``group_step`` takes the steps of one group, and ``scheduling`` chooses the waiting groups that may lease nodes. Each decision
repeats all commands that have no answer and are not in flight, so nothing is lost with a connection, a node or a supervisor.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from distflow.lifecycle.states import Reason, State, WorkflowState, roll_up_workflow
from distflow.state.event_details import (
    EventDetails,
    GroupCannotStart,
    WorkflowStatus,
)
from distflow.state.record import EventRecord, WorkflowRecord
from distflow.structs import replace
from distflow.supervisor.due_notifications import due_notifications, next_wait_notification
from distflow.supervisor.group_step import GroupStep
from distflow.supervisor.observations import announce_wait, end_unstarted
from distflow.supervisor.scheduling import Leases, next_leases, pool_usage
from distflow.supervisor.snapshot import Decision, LastDecision, Snapshot, StoredWorkflow, WorkflowView

__all__ = ["decide", "roll_up"]


def decide(snapshot: Snapshot, now: float) -> Decision:
    """Return the decision that follows from the snapshot at ``now`` (seconds since the epoch)."""
    decision = Decision()
    previous = _previous_views(snapshot, now)
    busy = {one.workflow for one in snapshot.in_flight}
    views: dict[str, WorkflowView] = {}
    for workflow in snapshot.workflows:
        uuid = workflow.record.uuid
        view = previous.get(uuid)
        # Of thousands of workflows, most do not change between decisions. An unchanged workflow costs only this check.
        if view is None or view.usage.workflow.record is not workflow.record or view.wake_at <= now or uuid in busy:
            view = _decide_workflow(snapshot, workflow, now, decision, is_busy=uuid in busy)
        elif view.wake_at < math.inf:
            decision.wake(view.wake_at)
        views[uuid] = view
    waiting = next_leases(snapshot, (view.usage for view in views.values()), now)
    decision.commands += waiting.commands
    _apply_leases(waiting, decision, views, now)
    if waiting.wake_at is not None:
        decision.wake(waiting.wake_at)
    decision.last_decision = LastDecision(at=now, pools=snapshot.pools, nodes=snapshot.nodes, views=views)
    return decision


def _apply_leases(waiting: Leases, decision: Decision, views: Mapping[str, WorkflowView], now: float) -> None:
    """Record why groups wait, and end those that would wait forever."""
    for (uuid, name), message in (waiting.messages | waiting.failures).items():
        record = decision.records.get(uuid) or views[uuid].usage.workflow.record
        group = record.group(name)
        if (uuid, name) in waiting.failures:
            after = end_unstarted(group, State.FAILED, Reason.START_ERROR, message, now)
            details: EventDetails | None = GroupCannotStart(message=message)
        else:
            after, details = announce_wait(group, message, waiting.unreachable.get((uuid, name)))
        if after is not group:
            decision.records[uuid] = record.with_group(after)
        if details is not None:
            decision.events.append(EventRecord(at=now, details=details, workflow=uuid, group=name))


def _previous_views(snapshot: Snapshot, now: float) -> Mapping[str, WorkflowView]:
    """Return the workflow views of the last decision, or none if a pool or a node has changed or the clock was set back."""
    last = snapshot.last_decision
    is_same = last.at <= now and last.pools is snapshot.pools and last.nodes is snapshot.nodes
    return last.views if is_same else {}


def _decide_workflow(
    snapshot: Snapshot, workflow: StoredWorkflow, now: float, decision: Decision, *, is_busy: bool
) -> WorkflowView:
    """Take every step of a workflow that is due.

    With ``is_busy``, commands of the workflow are in flight. They may get no answer, so the next decision examines the workflow
    again.
    """
    part = Decision()
    record = workflow.record
    for group in record.groups:
        after = GroupStep(snapshot, workflow, record, group, now, part).run()
        record = record if after is group else record.with_group(after)
    before, record = record, roll_up(record, now)
    if record is not before and record.status != before.status:
        status = WorkflowStatus(id=record.id, status=record.status)
        part.events.append(EventRecord(at=now, details=status, workflow=record.uuid))
    if workflow.notify:
        decision.notifications += due_notifications(workflow.notify, workflow.record, record, snapshot.last_decision.at, now)
        if (due_at := next_wait_notification(workflow.notify, record, now)) is not None:
            part.wake(due_at)
    has_changed = record is not workflow.record and record != workflow.record
    if has_changed:
        decision.records[record.uuid] = record
        workflow = replace(workflow, record=record)
    decision.events += part.events
    decision.commands += part.commands
    if part.wake_at is not None:
        decision.wake(part.wake_at)
    is_settled = not (has_changed or part.events or part.commands or is_busy)
    wake_at = (math.inf if part.wake_at is None else part.wake_at) if is_settled else -math.inf
    return WorkflowView(usage=pool_usage(workflow), wake_at=wake_at)


def roll_up(record: WorkflowRecord, now: float) -> WorkflowRecord:
    """Return the workflow with the state that follows from its groups; the same object if nothing changes."""
    if record.state.is_final:
        return record
    # Groups that an earlier workflow ran do not show whether this workflow has begun.
    states = [(group.state, group.reason) for group in record.groups if group.kept is None]
    state, reason = roll_up_workflow(states)
    started_at = record.started_at
    if started_at is None:
        started_at = min((group.running_at for group in record.groups if group.running_at is not None), default=None)
    # After a group ended without having run, the workflow is active but has no start time until another group runs.
    if state is WorkflowState.PENDING or (state, reason, started_at) == (record.state, record.reason, record.started_at):
        return record
    after = replace(record, state=state, reason=reason, started_at=started_at)
    if state.is_final:
        after = replace(after, ended_at=max((group.ended_at or now for group in record.groups), default=now))
    return after
