"""``decide(world, now) → decision``: the whole policy of gangs, in one pure function over frozen records.

``group_step`` returns what follows for one group, and ``scheduling`` which waiting groups may lease nodes. Commands are
repeated at every decision until their answer was applied (the loop leaves out those in flight), so nothing is lost with a
connection, a node or a supervisor.
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
from distflow.state.record import Event, WorkflowRecord
from distflow.structs import replace
from distflow.supervisor.group_step import GroupStep
from distflow.supervisor.observations import announce_wait, end_unstarted
from distflow.supervisor.scheduling import Leases, next_leases, share_of
from distflow.supervisor.snapshot import Decision, LastDecision, Workflow, WorkflowView, World

__all__ = ["decide", "roll_up"]


def decide(world: World, now: float) -> Decision:
    """Return what follows from the world as it is at ``now`` (seconds since the epoch)."""
    decision = Decision()
    known = _at_rest(world, now)
    busy = {one.workflow for one in world.in_flight}
    views: dict[str, WorkflowView] = {}
    for workflow in world.workflows:
        uuid = workflow.record.uuid
        view = known.get(uuid)
        # Most of thousands stay as they are, at every decision: they cost nothing more than this.
        if view is None or view.share.workflow.record is not workflow.record or view.wake_at <= now or uuid in busy:
            view = _look(world, workflow, now, decision, is_busy=uuid in busy)
        elif view.wake_at < math.inf:
            decision.wake(view.wake_at)
        views[uuid] = view
    waiting = next_leases(world, (view.share for view in views.values()), now)
    decision.commands += waiting.commands
    _take(waiting, decision, views, now)
    if waiting.wake_at is not None:
        decision.wake(waiting.wake_at)
    decision.rest = LastDecision(at=now, pools=world.pools, nodes=world.nodes, views=views)
    return decision


def _take(waiting: Leases, decision: Decision, views: Mapping[str, WorkflowView], now: float) -> None:
    """Write down what groups wait for, and end those that would wait forever."""
    for (uuid, name), message in (waiting.messages | waiting.failures).items():
        record = decision.records.get(uuid) or views[uuid].share.workflow.record
        group = record.group(name)
        if (uuid, name) in waiting.failures:
            after = end_unstarted(group, State.FAILED, Reason.START_ERROR, message, now)
            told: EventDetails | None = GroupCannotStart(message=message)
        else:
            after, told = announce_wait(group, message)
        if after is not group:
            decision.records[uuid] = record.with_group(after)
        if told is not None:
            decision.events.append(Event(at=now, details=told, workflow=uuid, group=name))


def _at_rest(world: World, now: float) -> Mapping[str, WorkflowView]:
    """Return what of the decision before still holds: nothing when a pool or a node has changed, or time has gone back."""
    rest = world.rest
    is_same = rest.at <= now and rest.pools is world.pools and rest.nodes is world.nodes
    return rest.views if is_same else {}


def _look(world: World, workflow: Workflow, now: float, decision: Decision, *, is_busy: bool) -> WorkflowView:
    """Take every step of a workflow that follows now. One with commands under way is not at rest: they may get no answer."""
    part = Decision()
    record = workflow.record
    for group in record.groups:
        after = GroupStep(world, workflow, record, group, now, part).run()
        record = record if after is group else record.with_group(after)
    before, record = record, roll_up(record, now)
    if record is not before and record.status != before.status:
        status = WorkflowStatus(id=record.id, status=record.status)
        part.events.append(Event(at=now, details=status, workflow=record.uuid))
    has_changed = record is not workflow.record and record != workflow.record
    if has_changed:
        decision.records[record.uuid] = record
        workflow = replace(workflow, record=record)
    decision.events += part.events
    decision.commands += part.commands
    if part.wake_at is not None:
        decision.wake(part.wake_at)
    is_at_rest = not (has_changed or part.events or part.commands or is_busy)
    wake_at = (math.inf if part.wake_at is None else part.wake_at) if is_at_rest else -math.inf
    return WorkflowView(share=share_of(workflow), wake_at=wake_at)


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
