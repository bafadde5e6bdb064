"""``decide(world, now) → decision``: the whole policy of gangs, in one pure function over frozen records.

For each group the state says what may happen next; the functions, those of ``starting`` first, are in the order of its life.
Commands are repeated at every decision until their answer was applied (the loop leaves out those under way), so nothing is
lost with a connection, a node or a supervisor: what is asked again answers what already is.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from distflow.documents.quantities import seconds_text
from distflow.lifecycle.states import Reason, State
from distflow.state.event_details import (
    CheckpointsDiffer,
    EventDetails,
    GroupCannotStart,
    GroupRescheduled,
    HangOver,
    HangSuspected,
    OrphanNotSeen,
    TaskStatus,
    WorkflowStatus,
)
from distflow.state.event_text import event_text
from distflow.state.record import CancelRequest, Cause, Event, GroupRecord, Stray
from distflow.supervisor.checkpointing import CANCELED_S, differences, due
from distflow.supervisor.commands import CollectOutput, PackCheckpoint, Prepare, Start, Stop
from distflow.supervisor.handover import Handover, hand_over
from distflow.supervisor.missing_ranks import check_outputs, hidden_cause, missing_ranks
from distflow.supervisor.observations import announce_wait, end_unstarted, stop_unstarted
from distflow.supervisor.queue import Leases, next_leases
from distflow.supervisor.retry import is_rescheduled, try_again
from distflow.supervisor.rolling import roll_up
from distflow.supervisor.room import share_of
from distflow.supervisor.starting import Starting
from distflow.supervisor.verdict import by_exit_actions, first_cause
from distflow.supervisor.world import Decision, LastDecision, Workflow, WorkflowView, World

__all__ = ["LOG_DRAIN_S", "MISSING_RANKS_S", "decide"]

LOG_DRAIN_S = 5.0
"""How long an ended group may wait for the last of its output before it is shown as ended; mirroring goes on after that."""

MISSING_RANKS_S = 30.0
"""How long tasks may print nothing, while ranks that they wait for can no longer join, before their group is stopped."""

_HANG_LOOK_S = 10.0


def decide(world: World, now: float) -> Decision:
    """Return what follows from the world as it is at ``now`` (seconds since the epoch)."""
    decision = Decision()
    known = _at_rest(world, now)
    busy = {one.workflow for one in world.in_flight}
    glances: dict[str, WorkflowView] = {}
    for workflow in world.workflows:
        uuid = workflow.record.uuid
        glance = known.get(uuid)
        # Most of thousands stay as they are, at every decision: they cost nothing more than this.
        if glance is None or glance.share.workflow.record is not workflow.record or glance.wake_at <= now or uuid in busy:
            glance = _look(world, workflow, now, decision, is_busy=uuid in busy)
        elif glance.wake_at < math.inf:
            decision.wake(glance.wake_at)
        glances[uuid] = glance
    waiting = next_leases(world, (glance.share for glance in glances.values()), now)
    decision.commands += waiting.commands
    _take(waiting, decision, glances, now)
    if waiting.wake_at is not None:
        decision.wake(waiting.wake_at)
    decision.rest = LastDecision(at=now, pools=world.pools, nodes=world.nodes, glances=glances)
    return decision


def _take(waiting: Leases, decision: Decision, glances: Mapping[str, WorkflowView], now: float) -> None:
    """Write down what groups wait for, and end those that would wait forever."""
    for (uuid, name), message in (waiting.messages | waiting.failures).items():
        record = decision.records.get(uuid) or glances[uuid].share.workflow.record
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
    return rest.glances if is_same else {}


def _look(world: World, workflow: Workflow, now: float, decision: Decision, *, is_busy: bool) -> WorkflowView:
    """Take every step of a workflow that follows now. One with commands under way is not at rest: they may get no answer."""
    part = Decision()
    record = workflow.record
    for group in record.groups:
        after = _Step(world, workflow, record, group, now, part).run()
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


class _Step(Starting):
    """One group's step: what follows from where it is."""

    def run(self) -> GroupRecord:
        """Return the group after everything that follows at once."""
        self._strays()
        if self.record.cancel is not None:
            self._cancel(self.record.cancel)
        if self.group.state is State.WAITING:
            self._waiting()
        if self.group.state is State.SCHEDULING:
            self._scheduling()
        if self.group.state is State.INITIALIZING:
            self._lost_nodes()
            self._initializing()
        if self.group.state is State.RUNNING:
            self._lost_nodes()
            self._running()
        if self.group.state is State.STOPPING:
            self._lost_nodes()
            self._stopping()
        return self.group

    # Cancellation.

    def _cancel(self, request: CancelRequest) -> None:
        message = _canceled(request)
        if self.group.state in (State.WAITING, State.SCHEDULING):
            if not self._is_leasing:
                self._end_unstarted(State.CANCELED, Reason.CANCELED, message)
        elif self.group.state in (State.INITIALIZING, State.RUNNING):
            self._stop(Reason.CANCELED, message)

    # RUNNING: one fails, all stop; the lead decides the end.

    def _running(self) -> None:
        group, plan = self.group, self.plan
        for task in group.tasks:
            if task.state is State.INITIALIZING:
                # Without a barrier, or a supervisor that was killed between two starts.
                self._command(Start if task.prepared else Prepare, task)
        failed = [task for task in group.tasks if task.state is State.FAILED and self.plan.counts(task.name)]
        if failed:
            first = min(failed, key=lambda task: task.ended_at or self.now)
            if all(task.state.is_final for task in group.tasks):
                self.group = replace(group, stop_reason=Reason.PEER_FAILED)
                self._finish()
            else:
                self._stop(Reason.PEER_FAILED, f"{first.name}: {first.message}")
            return
        if all(task.state.is_final for task in group.tasks):
            self._finish()
            return
        lead = next(task for task in group.tasks if task.lead)
        if (plan.ignore_nonlead_status or plan.ends_with_lead) and lead.state is State.COMPLETED:
            self._stop(None, "the lead completed")
            return
        self._save()
        self._hangs()
        if self._missing_ranks():
            return
        limit = plan.timeouts.exec_s
        if limit is not None and group.running_at is not None:
            if self.now >= group.running_at + limit:
                self._stop(Reason.EXEC_TIMEOUT, f"ran longer than {seconds_text(limit)} (exec_timeout)")
            else:
                self.decision.wake(group.running_at + limit)

    def _missing_ranks(self) -> bool:
        """Say when ranks wait for others that failed unnoticed, and stop the group when those can no longer join."""
        before, self.group = self.group, check_outputs(self.group, self.plan, self._last_lines)
        found = missing_ranks(self.group)
        if found is None:
            return False
        self._say(found.message)
        wanted = self.plan.stop_on_missing_ranks
        if wanted is False or (wanted is None and found.failure.have_met):
            return False
        if self.group is not before:
            return False  # from the next look on, signs of life of those that wait are known
        signs = (self.world.alive_at.get((self.record.uuid, self.group.name, task.name)) for task in found.waiting)
        quiet_since = max([found.task.ended_at or self.now, *(at for at in signs if at is not None)])
        if self.now < quiet_since + MISSING_RANKS_S:
            self.decision.wake(quiet_since + MISSING_RANKS_S)
            return False
        self._stop(Reason.PEER_FAILED, found.message)
        return True

    def _hangs(self) -> None:
        """Say when the whole gang has been silent for long, and take it back when it speaks again. Nothing is ended."""
        limit = self.plan.timeouts.hang_s
        if limit is None or any(self._unreachable(task) for task in self.group.tasks):
            return
        signs = (self.world.alive_at.get((self.record.uuid, self.group.name, task.name)) for task in self.group.tasks)
        silent_since = max([self.group.running_at or self.now, *(at for at in signs if at is not None)])
        if self.now < silent_since + limit:
            self.decision.wake(silent_since + limit)
            if self.group.silent_since is not None:
                self.group = replace(self.group, silent_since=None, message="")
                self._tell(HangOver())
            return
        if self.group.silent_since is None:
            hang = HangSuspected(limit_s=limit, workflow_id=self.record.id)
            self.group = replace(self.group, silent_since=silent_since, message=event_text(hang, group=None, task=None))
            self._tell(hang)
        self.decision.wake(self.now + _HANG_LOOK_S)

    # STOPPING: until nothing is left anywhere.

    def _stopping(self) -> None:
        if all(task.state.is_final for task in self.group.tasks):
            self._finish()
            return
        is_forced = self.record.cancel is not None and self.record.cancel.force
        for task in self.group.tasks:
            # A person may lose patience with one that has its grace already.
            is_hastened = is_forced and task.state is State.STOPPING and task.grace_s != 0
            if is_hastened or task.state in (State.INITIALIZING, State.RUNNING):
                self._command(partial(Stop, grace_s=self._grace_s(), why=self._why()), task)
            elif task.state in (State.WAITING, State.SCHEDULING):
                # Its lease is gone already, so nothing of it is anywhere.
                self.group = self.group.with_task(stop_unstarted(task, self.group.stop_reason, self.now))
        if all(task.state.is_final for task in self.group.tasks):
            self._finish()

    def _grace_s(self) -> float:
        if self.record.cancel is not None and self.record.cancel.force:
            return 0.0
        if self.pool is None:
            return 30.0
        return self.pool.peer_failed_grace_s if self.group.stop_reason is Reason.PEER_FAILED else self.pool.stop_grace_s

    def _why(self) -> str:
        return self.group.stop_reason.value if self.group.stop_reason else "LEAD_COMPLETED"

    def _lost_nodes(self) -> None:
        """A task fails with NODE_LOST when its node was unreachable for longer than the pool allows."""
        if self.pool is None:
            return
        for task in self.group.tasks:
            view = self._node(task)
            if task.state.is_final or view is None or view.up:
                continue
            deadline = view.since + self.pool.node_lost_after_s
            if self.now < deadline:
                self.decision.wake(deadline)
                continue
            gone = f"{task.node} has been unreachable for {seconds_text(self.now - view.since)}: {view.error}"
            lost = replace(
                task, state=State.FAILED, reason=Reason.NODE_LOST, message=gone, ended_at=self.now, log_complete=True,
                stray=Stray.OUT_OF_REACH,
            )  # fmt: skip
            lost = by_exit_actions(lost, self.plan.launch(task.name).exit_actions)
            self.group = self.group.with_task(lost)
            self._tell(TaskStatus(status=lost.status, message=lost.message), task)

    def _strays(self) -> None:
        """Stop what was given up, as soon as its node is back: it may hold GPUs, and the ranks of its world are gone.

        Neither that nor output that a lost node still holds is waited for longer than nodes keep it.
        """
        for task in (*self.group.earlier, *self.group.tasks):
            if task.stray is None and not (task.state.is_final and not task.log_complete and self._unreachable(task)):
                continue
            forgotten_at = (task.ended_at or self.now) + self.pool.retention_s if self.pool is not None else math.inf
            if self.now >= forgotten_at:
                self.group = self.group.with_task(replace(task, stray=None, log_complete=True))
                self._tell(OrphanNotSeen(node=task.node), task)
                continue
            self.decision.wake(forgotten_at)
            if task.stray is Stray.OUT_OF_REACH:
                self._command(partial(Stop, why=Reason.NODE_LOST.value), task)

    # The end.

    def _finish(self) -> None:
        drained = all(task.log_complete or self._unreachable(task) for task in self.group.tasks)
        ended = max((task.ended_at or self.now for task in self.group.tasks), default=self.now)
        if not drained and self.now < ended + LOG_DRAIN_S:
            self.decision.wake(ended + LOG_DRAIN_S)
            return
        saving = self._save()
        if saving:
            if self.group.stop_reason in (None, Reason.PEER_FAILED):  # else its message is why it ends
                self._say(saving)
            return
        group = self.group
        cause = first_cause([task for task in group.tasks if self.plan.counts(task.name)], self._lines())
        if cause is None and group.stop_reason is Reason.PEER_FAILED:
            # A task whose end would not count, had it ever been started.
            cause = first_cause(group.tasks, self._lines())
        if cause is not None or group.stop_reason is Reason.PEER_FAILED:
            cause = hidden_cause(group, cause, self._last_lines)
        if group.stop_reason is Reason.CANCELED:
            self._become(State.CANCELED, reason=Reason.CANCELED, ended_at=ended, cause=None)
        elif group.stop_reason is Reason.EXEC_TIMEOUT:
            self._become(State.FAILED, reason=group.stop_reason, ended_at=ended, cause=None)
        elif group.stop_reason is Reason.START_TIMEOUT:
            late = Cause(task=self.plan.lead.task, reason=group.stop_reason, message=group.message, at=ended)
            if not self._try_again(late):
                self._become(State.FAILED, reason=group.stop_reason, ended_at=ended, cause=None)
        elif cause is not None:
            self._fail(cause, ended)
        else:
            self._hand_over(ended)

    def _save(self) -> str:
        """Take the checkpoints that are due; return what is still to be saved of tasks that have ended, in words."""
        cancel = self.record.cancel
        if cancel is not None:
            # What a task saves in the grace of its stop is saved, too, however long that is.
            patient_until = max(cancel.at, *(task.ended_at or self.now for task in self.group.tasks)) + CANCELED_S
            if cancel.force or self.now >= patient_until:
                return ""
            self.decision.wake(patient_until)
        found = due(self.plan, self.record, self.group, self._node, self._lost_after_s, self.now)
        for task, checkpoint in found.packs:
            self._command(partial(PackCheckpoint, checkpoint=checkpoint), task)
        self._give(found.stores)
        if found.wake_at is not None:
            self.decision.wake(found.wake_at)
        return found.message

    def _hand_over(self, ended: float) -> None:
        """Complete as soon as what waiting groups take of it is here, and what goes to URLs is there."""
        found = hand_over(self.whole, self.record, self.group, self._node, self._lost_after_s, self.now)
        if found.spoilt is not None:
            self._fail(found.spoilt, self.now)
        elif not found.message:
            self._become(State.COMPLETED, ended_at=max(ended, found.saved_at), message="")
        elif (cancel := self.record.cancel) is not None and not any(one.state is State.WAITING for one in self.record.groups):
            # Its lead had ended it before the cancel; only URLs want something of it now.
            self._become(State.CANCELED, reason=Reason.CANCELED, ended_at=ended, message=_canceled(cancel))
        else:
            self._fetch(found)

    def _fetch(self, found: Handover) -> None:
        for task in found.missing:
            self._command(partial(CollectOutput, for_nodes=not self.plan.launch(task.name).url_outputs), task)
        self._give(found.commands)
        if found.wake_at is not None:
            self.decision.wake(found.wake_at)
        self._say(found.message)

    def _fail(self, cause: Cause, ended: float) -> None:
        if self._try_again(cause):
            return
        message = f"{cause.task}: {cause.message}"
        if self.group.attempt:
            last = ", the last" if is_rescheduled(self.plan, self.group, cause) else ""
            message += f" (attempt {self.group.attempt + 1}{last})"
        self._become(State.FAILED, reason=cause.reason, ended_at=ended, cause=cause, message=message)

    def _try_again(self, cause: Cause) -> bool:
        again = try_again(self.plan, self.group, cause, self.now) if is_rescheduled(self.plan, self.group, cause) else None
        if again is not None:
            self.group = again
            self._tell(GroupRescheduled(failed_task=cause.task, message=cause.message, next=again.message))
            if words := differences(self.plan, again):
                self._tell(CheckpointsDiffer(message=words))
        return again is not None


def _canceled(request: CancelRequest) -> str:
    return f"canceled by {request.by}" + (f": {request.message}" if request.message else "")
