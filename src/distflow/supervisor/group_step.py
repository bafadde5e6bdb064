"""The policy of one group: its steps from WAITING to its end. This module does no I/O: all effects are commands and events.

The methods are in the order of a group's states. Each step repeats all commands that are not in flight and whose answer has not
been applied.

A group with attempts left is retried if the exit actions of the task that is the first cause require it. A retry always
restarts the whole gang: the ranks of a world cannot continue with a new member, and tasks without a world have each other's
addresses. Each attempt gets new leases, and its timeouts start again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from functools import partial

from distflow.backends.base import AttemptKey
from distflow.documents.quantities import seconds_text
from distflow.documents.text import few
from distflow.lifecycle.exits import Action, action_of
from distflow.lifecycle.states import Reason, State, broken_upstream, still_awaited, waiting_text
from distflow.plan.model import GroupPlan
from distflow.pools.model import Pool
from distflow.state.event_details import (
    CheckpointsDiffer,
    EventDetails,
    GroupRescheduled,
    GroupStatus,
    GroupWaiting,
    HangOver,
    HangSuspected,
    OrphanNotSeen,
    TaskStatus,
)
from distflow.state.event_text import event_text, next_attempt_text
from distflow.state.record import (
    CancelRequest,
    Cause,
    EventRecord,
    GroupRecord,
    OrphanState,
    TaskRecord,
    WorkflowRecord,
    fresh_tasks,
)
from distflow.structs import replace
from distflow.supervisor.checkpoints import CANCELED_S, checkpoint_differences, due_checkpoints
from distflow.supervisor.commands import (
    BuildVenv,
    CollectOutput,
    Command,
    CommandId,
    Lease,
    PackCheckpoint,
    Prepare,
    Release,
    Start,
    Stop,
)
from distflow.supervisor.failures import (
    by_exit_actions,
    check_outputs,
    first_cause,
    hidden_cause,
    missing_ranks,
    with_own_failures,
)
from distflow.supervisor.observations import CANNOT_START, end_unstarted, stop_unstarted, without_build
from distflow.supervisor.snapshot import Decision, NodeView, Snapshot, StoredWorkflow, attempt_key
from distflow.supervisor.transfers import GroupTransfers, PendingOutputs, inherited_results, input_transfers, pending_outputs

__all__ = ["LOG_DRAIN_S", "MISSING_RANKS_S", "GroupStep", "is_rescheduled", "next_attempt"]


LOG_DRAIN_S = 5.0
"""Seconds that an ended group waits for the rest of its output before it is shown as ended. They count from the end of its last
task or, if later, from when a node with unread output became reachable or unreachable. Mirroring continues after that."""

MISSING_RANKS_S = 30.0
"""Seconds without output and heartbeats from tasks that wait for missing ranks. Then the group may be stopped."""

_HANG_CHECK_S = 10.0


class GroupStep:
    """One step of a group: reads the snapshot, changes the group, and adds commands, events and wake-ups to a decision."""

    def __init__(
        self,
        snapshot: Snapshot,
        workflow: StoredWorkflow,
        record: WorkflowRecord,
        group: GroupRecord,
        now: float,
        decision: Decision,
    ) -> None:
        self.snapshot = snapshot
        self.record = record
        self.workflow_plan = workflow.plan
        self.group = group
        self.plan: GroupPlan = workflow.plan.group(group.name)
        self.pool: Pool | None = snapshot.pools.get(record.pool_key)
        self.now = now
        self.decision = decision

    def run(self) -> GroupRecord:
        """Take all steps that are due, and return the group."""
        self._stop_orphans()
        if self.record.cancel is not None:
            self._cancel(self.record.cancel)
        if self.group.state is State.WAITING:
            self._waiting()
        if self.group.state is State.SCHEDULING:
            self._scheduling()
        if self.group.state is State.INITIALIZING:
            self._end_lost_tasks()
            self._initializing()
        if self.group.state is State.RUNNING:
            self._end_lost_tasks()
            self._running()
        if self.group.state is State.STOPPING:
            self._end_lost_tasks()
            self._stopping()
        return self.group

    # Cancellation.

    def _cancel(self, request: CancelRequest) -> None:
        message = _canceled(request)
        if self.group.state in (State.WAITING, State.SCHEDULING):
            if not self._waits_for_answer:
                self.group = replace(self.group, venv_builds=())
                self._end_unstarted(State.CANCELED, Reason.CANCELED, message)
        elif self.group.state in (State.INITIALIZING, State.RUNNING):
            self._stop(Reason.CANCELED, message)

    # WAITING: until every group upstream has completed, and each input is on this machine or, if nodes fetch it, was checked.

    def _waiting(self) -> None:
        states = {group.name: group.state for group in self.record.groups}
        broken = broken_upstream(self.plan.upstream, states)
        if broken is not None:
            message = f"upstream group {broken} did not complete: {self.record.group(broken).status}"
            self._end_unstarted(State.FAILED, Reason.UPSTREAM, message)
            return
        awaited = still_awaited(self.plan.upstream, states)
        data = GroupTransfers() if awaited else input_transfers(self.plan, self.record, self.group)
        self._add_commands(data.commands)
        if data.failed is not None:
            self._end_unstarted(State.FAILED, data.failed.reason, f"{data.failed.task}: {data.failed.message}")
            return
        message = waiting_text(awaited) if awaited else data.message
        if message:
            self._show_message(message)
            return
        self.group = replace(self.group, tasks=tuple(replace(task, state=State.SCHEDULING) for task in self.group.tasks))
        self._enter(State.SCHEDULING, scheduling_at=self.now, message="")

    # SCHEDULING: until the group has leased nodes, which the module `scheduling` requests, or its `queue_timeout` is over.

    def _scheduling(self) -> None:
        if self.group.venv_builds:
            self._build_venvs()
            return
        limit, since = self.plan.timeouts.queue_s, self.group.scheduling_at
        if limit is None or since is None:
            return
        if self._waits_for_answer:
            return
        if self.now >= since + limit:
            waited = f"waited {seconds_text(limit)} for nodes (queue_timeout)"
            message = f"{waited}; last: {self.group.waits_for or self.group.message}" if self.group.message else waited
            self._end_unstarted(State.FAILED, Reason.QUEUE_TIMEOUT, message)
        else:
            self.decision.wake(since + limit)

    def _build_venvs(self) -> None:
        """Build the Python environment on the nodes that the group tried to lease. The group holds no nodes meanwhile."""
        for build in self.group.venv_builds:
            key = attempt_key(self.record, self.group, replace(self.group.task(build.task), node=build.node))
            view = self.snapshot.nodes.get((self.record.pool_key, build.node))
            if key is not None and view is not None and view.up:
                self._add_commands([BuildVenv(self.record.pool_key, key)])
            else:
                # The next lease may choose another node.
                self.group = without_build(self.group, build.node, self.now)

    # INITIALIZING: prepare the tasks and start them, together if the plan says so.

    def _initializing(self) -> None:
        relayed = self._relay()
        group = self.group
        failed = [
            task
            for task in group.tasks
            if (task.reason in CANNOT_START or task.state is State.FAILED)
            and (task.started_at is None or self.plan.counts(task.name))
        ]
        if failed:
            self._stop(Reason.PEER_FAILED, f"{failed[0].name}: {failed[0].message}")
            return
        given_back = [task for task in group.tasks if task.state is State.SCHEDULING or task.reason is Reason.START_TIMEOUT]
        started = [task for task in group.tasks if task.state is State.RUNNING or task.state.is_final]
        if given_back and not started:
            self._withdraw()
            return
        if given_back:
            self._stop(Reason.START_TIMEOUT, f"{given_back[0].name} lost its lease after other tasks had started")
            return
        if len(started) == len(group.tasks):
            self._enter(State.RUNNING, running_at=min(task.started_at or self.now for task in started))
            return
        barrier_s = self.pool.start_barrier_s if self.pool else 120.0
        moved_at = [task.transfer.at for task in group.tasks if task.transfer is not None]
        moved_at += [one.at for one in group.transfer_results]
        deadline = max([group.initializing_at or self.now, *moved_at]) + barrier_s
        if self.now >= deadline and group.withdrawing is False:
            late = (
                ", ".join(_late(task) for task in group.tasks if not task.prepared or task.outage)
                or f"no confirmation of the start of {few([_late(task) for task in group.tasks if task not in started])}"
            )
            self._stop(Reason.START_TIMEOUT, f"not ready within {seconds_text(barrier_s)}: {late}")
            return
        self.decision.wake(deadline)
        # If tasks start together, none starts while a node is unreachable: a started task would only wait.
        waiting = [task for task in group.tasks if task.state is State.INITIALIZING]
        ready = all(task.prepared and not self._unreachable(task) for task in waiting)
        for task in group.tasks:
            if task.state is not State.INITIALIZING:
                continue
            if not task.prepared:
                if relayed:
                    self._command_task(Prepare, task)
            elif ready or not self.plan.starts_as_one:
                self._command_task(Start, task)

    def _relay(self) -> bool:
        """Fetch the inputs that a node could not fetch itself. Return whether all of these transfers are done."""
        data = input_transfers(self.plan, self.record, self.group)
        self._add_commands(data.commands)
        if data.failed is not None:
            task = self.group.task(data.failed.task)
            self.group = self.group.with_task(replace(task, reason=data.failed.reason, message=data.failed.message))
        return not data.commands

    def _withdraw(self) -> None:
        """Release the remaining leases of a group that lost one of them, then queue the group again."""
        held = [task for task in self.group.tasks if task.state is State.INITIALIZING]
        if held:
            self.group = replace(self.group, withdrawing=True)
            for task in held:
                self._command_task(Release, task)
            return
        tasks = fresh_tasks(self.plan, self.group.attempt, State.SCHEDULING)
        # The time with nodes does not count as waiting for nodes.
        had_s = max(0.0, self.now - (self.group.initializing_at or self.now))
        self.group = replace(
            self.group, tasks=tasks, left_out=(), binding=None, withdrawing=False, initializing_at=None, waits_for="",
            scheduling_at=(self.group.scheduling_at or self.now) + had_s,
        )  # fmt: skip
        self._enter(State.SCHEDULING, message="its lease was lost before the start; queued again", not_before=self.now + 1.0)

    def _end_unstarted(self, state: State, reason: Reason, message: str) -> None:
        self.group = end_unstarted(self.group, state, reason, message, self.now)
        self._add_event(GroupStatus(status=self.group.status, message=message))

    # RUNNING: a failure that the plan counts stops all tasks. If the plan says so, the lead's completion ends the group.

    def _running(self) -> None:
        group, plan = self.group, self.plan
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
        self._save_checkpoints()
        self._report_hangs()
        if self._check_missing_ranks():
            return
        limit = plan.timeouts.exec_s
        if limit is not None and group.running_at is not None:
            if self.now >= group.running_at + limit:
                self._stop(Reason.EXEC_TIMEOUT, f"ran longer than {seconds_text(limit)} (exec_timeout)")
            else:
                self.decision.wake(group.running_at + limit)

    def _check_missing_ranks(self) -> bool:
        """Report ranks that failed unnoticed and that others wait for. Stop the group if they failed before the rendezvous.

        The spec may forbid the stop, or extend it to later failures. Return whether the group was stopped.
        """
        before, self.group = self.group, check_outputs(self.group, self.plan, self._last_lines)
        found = missing_ranks(self.group)
        if found is None:
            return False
        self._show_message(found.message)
        wanted = self.plan.stop_on_missing_ranks
        if wanted is False or (wanted is None and found.failure.may_have_joined):
            return False
        if self.group is not before:
            return False  # only the next snapshot has the times of the last activity of the waiting tasks
        active_at = (self.snapshot.alive_at.get((self.record.uuid, self.group.name, task.name)) for task in found.waiting)
        quiet_since = max([found.task.ended_at or self.now, *(at for at in active_at if at is not None)])
        if self.now < quiet_since + MISSING_RANKS_S:
            self.decision.wake(quiet_since + MISSING_RANKS_S)
            return False
        self._stop(Reason.PEER_FAILED, found.message)
        return True

    def _report_hangs(self) -> None:
        """Report a gang without output and heartbeats for longer than ``hang_timeout``, and its next progress.

        The gang is not stopped.
        """
        limit = self.plan.timeouts.hang_s
        if limit is None or any(self._unreachable(task) for task in self.group.tasks):
            return
        active_at = (self.snapshot.alive_at.get((self.record.uuid, self.group.name, task.name)) for task in self.group.tasks)
        silent_since = max([self.group.running_at or self.now, *(at for at in active_at if at is not None)])
        if self.now < silent_since + limit:
            self.decision.wake(silent_since + limit)
            if self.group.silent_since is not None:
                self.group = replace(self.group, silent_since=None, message="")
                self._add_event(HangOver())
            return
        if self.group.silent_since is None:
            hang = HangSuspected(limit_s=limit, workflow_id=self.record.id)
            self.group = replace(self.group, silent_since=silent_since, message=event_text(hang, group=None, task=None))
            self._add_event(hang)
        self.decision.wake(self.now + _HANG_CHECK_S)

    # STOPPING: until all processes have ended.

    def _stopping(self) -> None:
        if all(task.state.is_final for task in self.group.tasks):
            self._finish()
            return
        is_forced = self.record.cancel is not None and self.record.cancel.force
        for task in self.group.tasks:
            # A forced cancellation also ends a grace period that has begun.
            is_hastened = is_forced and task.state is State.STOPPING and task.grace_s != 0
            if is_hastened or task.state in (State.INITIALIZING, State.RUNNING):
                self._command_task(partial(Stop, grace_s=self._grace_s(), why=self._stop_reason()), task)
            elif task.state in (State.WAITING, State.SCHEDULING):
                # Its lease is gone, so it has no processes.
                self.group = self.group.with_task(stop_unstarted(task, self.group.stop_reason, self.now))
        if all(task.state.is_final for task in self.group.tasks):
            self._finish()

    def _grace_s(self) -> float:
        if self.record.cancel is not None and self.record.cancel.force:
            return 0.0
        if self.pool is None:
            return 30.0
        return self.pool.peer_failed_grace_s if self.group.stop_reason is Reason.PEER_FAILED else self.pool.stop_grace_s

    def _stop_reason(self) -> str:
        return self.group.stop_reason.value if self.group.stop_reason else "LEAD_COMPLETED"

    def _end_lost_tasks(self) -> None:
        """End tasks with NODE_LOST if their node was unreachable for longer than the pool allows.

        If a cluster engine (Slurm, Kubernetes or Ray) chooses the nodes, this time restarts after each outage of the engine.
        """
        if self.pool is None:
            return
        for task in self.group.tasks:
            view = self._node(task)
            if task.state.is_final or view is None or view.up:
                continue
            lost_after_s = self.pool.node_lost_after_s
            # A canceled workflow ends even if its engine does not answer.
            deadline = view.lost_at(lost_after_s, self.now) if self.record.cancel is None else view.since + lost_after_s
            if self.now < deadline:
                self.decision.wake(deadline)
                continue
            gone = f"{task.node} has been unreachable for {seconds_text(self.now - view.since)}: {view.error}"
            lost = replace(
                task, state=State.FAILED, reason=Reason.NODE_LOST, message=gone, ended_at=self.now, log_complete=True,
                orphan=OrphanState.UNREACHABLE,
            )  # fmt: skip
            lost = by_exit_actions(lost, self.plan.launch(task.name).exit_actions)
            self.group = self.group.with_task(lost)
            self._add_event(TaskStatus(status=lost.status, message=lost.message), task)

    def _stop_orphans(self) -> None:
        """Stop orphan attempts as soon as their node is back: they may hold GPUs, and the other ranks of their world are gone.

        The supervisor waits for orphans, and for output on lost nodes, only as long as nodes keep the files of attempts.
        """
        for task in (*self.group.earlier, *self.group.tasks):
            if task.orphan is None and not (task.state.is_final and not task.log_complete and self._unreachable(task)):
                continue
            forgotten_at = (task.ended_at or self.now) + self.pool.retention_s if self.pool is not None else math.inf
            if self.now >= forgotten_at:
                self.group = self.group.with_task(replace(task, orphan=None, log_complete=True))
                if task.orphan is OrphanState.UNREACHABLE:
                    self._add_event(OrphanNotSeen(node=task.node), task)
                continue
            self.decision.wake(forgotten_at)
            if task.orphan is OrphanState.UNREACHABLE:
                self._command_task(partial(Stop, why=Reason.NODE_LOST.value), task)

    # The end.

    def _finish(self) -> None:
        ended = max((task.ended_at or self.now for task in self.group.tasks), default=self.now)
        unread = [task for task in self.group.tasks if not task.log_complete]
        # A node that becomes reachable again may report an end that is hours old. The rest of its output arrives later.
        patient_until = max([ended, *(view.since for task in unread if (view := self._node(task)) is not None)]) + LOG_DRAIN_S
        if unread and self.now < patient_until:
            self.decision.wake(patient_until)
            return
        saving = self._save_checkpoints()
        if saving:
            if self.group.stop_reason in (None, Reason.PEER_FAILED):  # otherwise, the message says why it ends
                self._show_message(saving)
            return
        lines = self._lines()
        self.group = group = with_own_failures(self.group, self.plan.counts, lines)
        cause = first_cause([task for task in group.tasks if self.plan.counts(task.name)], lines)
        if cause is None and group.stop_reason is Reason.PEER_FAILED:
            # No failure of a started task fails the group, so the cause is a task that could not start.
            cause = first_cause([task for task in group.tasks if task.started_at is None], lines)
        if cause is not None or group.stop_reason is Reason.PEER_FAILED:
            cause = hidden_cause(group, cause, self._last_lines)
        if group.stop_reason is Reason.CANCELED:
            self._enter(State.CANCELED, reason=Reason.CANCELED, ended_at=ended, cause=None)
        elif group.stop_reason is Reason.EXEC_TIMEOUT:
            self._enter(State.FAILED, reason=group.stop_reason, ended_at=ended, cause=None)
        elif group.stop_reason is Reason.START_TIMEOUT:
            late = Cause(task=self.plan.lead.task, reason=group.stop_reason, message=group.message, at=ended)
            if not self._retry(late):
                self._enter(State.FAILED, reason=group.stop_reason, ended_at=ended, cause=None)
        elif cause is not None:
            self._fail(cause, ended)
        elif failed := [task for task in group.tasks if task.state is State.FAILED and self.plan.counts(task.name)]:
            # Their nodes report that another task failed, but that task did not.
            first = min(failed, key=lambda task: task.ended_at or 0.0)
            reason = first.reason or Reason.INTERNAL
            self._fail(Cause(task=first.name, reason=reason, message=first.message, at=ended, node=first.node), ended)
        else:
            self._complete(ended)

    def _save_checkpoints(self) -> str:
        """Take the checkpoints that are due. Return a message about checkpoints of ended tasks that remain to be saved."""
        cancel = self.record.cancel
        if cancel is not None:
            # Checkpoints that a task writes during its grace period are saved too, however long that period is.
            patient_until = max(cancel.at, *(task.ended_at or self.now for task in self.group.tasks)) + CANCELED_S
            if cancel.force or self.now >= patient_until:
                return ""
            self.decision.wake(patient_until)
        found = due_checkpoints(self.plan, self.record, self.group, self._node, self._lost_after_s, self.now)
        for task, checkpoint in found.packs:
            self._command_task(partial(PackCheckpoint, checkpoint=checkpoint), task)
        self._add_commands(found.stores)
        if found.wake_at is not None:
            self.decision.wake(found.wake_at)
        return found.message

    def _complete(self, ended: float) -> None:
        """Complete the group when its outputs for waiting groups have been collected and those for URLs are written.

        If an output will never be available, the group fails. If the workflow was canceled and no group waits for outputs, the
        group ends as canceled.
        """
        found = pending_outputs(self.workflow_plan, self.record, self.group, self._node, self._lost_after_s, self.now)
        if found.failure is not None:
            self._fail(found.failure, self.now)
        elif not found.message:
            self._enter(State.COMPLETED, ended_at=max(ended, found.saved_at), message="")
        elif (cancel := self.record.cancel) is not None and not any(one.state is State.WAITING for one in self.record.groups):
            # The lead ended the group before the workflow was canceled. The remaining outputs are only for URLs.
            self._enter(State.CANCELED, reason=Reason.CANCELED, ended_at=ended, message=_canceled(cancel))
        else:
            self._collect_outputs(found)

    def _collect_outputs(self, found: PendingOutputs) -> None:
        for task in found.missing:
            self._command_task(partial(CollectOutput, for_nodes=not self.plan.launch(task.name).url_outputs), task)
        self._add_commands(found.commands)
        if found.wake_at is not None:
            self.decision.wake(found.wake_at)
        self._show_message(found.message)

    def _fail(self, cause: Cause, ended: float) -> None:
        if self._retry(cause):
            return
        message = f"{cause.task}: {cause.message}"
        if self.group.attempt:
            last = ", the last" if is_rescheduled(self.plan, self.group, cause) else ""
            message += f" (attempt {self.group.attempt + 1}{last})"
        self._enter(State.FAILED, reason=cause.reason, ended_at=ended, cause=cause, message=message)

    def _retry(self, cause: Cause) -> bool:
        """Begin the next attempt if the spec requires and allows one after this failure. Return whether it has begun."""
        if not is_rescheduled(self.plan, self.group, cause):
            return False
        following = next_attempt(self.plan, self.group, cause, self.now)
        if following is None:
            return False
        self.group = following
        self._add_event(
            GroupRescheduled(
                failed_task=cause.task, message=cause.message, attempt=following.attempt + 1,
                attempts=self.plan.retry.limit + 1, wait_s=self.plan.retry.wait_s(following.attempt),
            )
        )  # fmt: skip
        if found := checkpoint_differences(self.plan, following):
            self._add_event(CheckpointsDiffer(sizes=found))
        return True

    # Helpers.

    def _stop(self, reason: Reason | None, message: str) -> None:
        self._enter(State.STOPPING, stop_reason=reason, stopping_at=self.now, message=message, withdrawing=False)

    def _enter(self, state: State, **changes: object) -> None:
        before = self.group.state
        self.group = replace(self.group, state=state, **changes)  # type: ignore[arg-type]
        if state is not before:
            self._add_event(GroupStatus(status=self.group.status, message=self.group.message))

    def _add_event(self, details: EventDetails, task: TaskRecord | None = None) -> None:
        self.decision.events.append(
            EventRecord(
                at=self.now, details=details, workflow=self.record.uuid, group=self.group.name,
                task=task.name if task else None, attempt=task.attempt if task else None,
            )
        )  # fmt: skip

    def _command_task(self, make: Callable[[str, AttemptKey], Command], task: TaskRecord) -> None:
        """Add the command that ``make`` returns for the pool and the task's attempt, if the task's node is reachable."""
        key, view = attempt_key(self.record, self.group, task), self._node(task)
        if key is not None and view is not None and view.up:
            self._add_commands([make(self.record.pool_key, key)])

    def _add_commands(self, commands: Iterable[Command]) -> None:
        self.decision.commands += [one for one in commands if one.id not in self.snapshot.in_flight]

    @property
    def _waits_for_answer(self) -> bool:
        """Whether a lease is requested from the group's nodes, which answer soon. False for an engine, which may take days."""
        if self.pool is not None and self.pool.is_allocated:
            return False
        group = AttemptKey(workflow=self.record.uuid, group=self.group.name, task="", attempt=self.group.attempt, node="")
        return CommandId.of(Lease, group) in self.snapshot.in_flight

    def _node(self, task: TaskRecord) -> NodeView | None:
        return self.snapshot.nodes.get((self.record.pool_key, task.node)) if task.node else None

    def _unreachable(self, task: TaskRecord) -> bool:
        view = self._node(task)
        return view is not None and not view.up

    @property
    def _lost_after_s(self) -> float:
        return self.pool.node_lost_after_s if self.pool else 120.0

    def _show_message(self, message: str) -> None:
        """Show why the group waits, and add an event if the reason is new."""
        if self.group.message != message:
            self.group = replace(self.group, message=message)
            self._add_event(GroupWaiting(message=message))

    def _lines(self) -> Mapping[str, tuple[str, ...]]:
        """Return the last lines of the tasks that failed."""
        return {task.name: self._last_lines(task) for task in self.group.tasks if task.state is State.FAILED}

    def _last_lines(self, task: TaskRecord) -> tuple[str, ...]:
        return self.snapshot.lines.get((self.record.uuid, self.group.name, task.name), ())


def _late(task: TaskRecord) -> str:
    return f"{task.name} on {task.node}" + (", which is unreachable" if task.outage else "")


def _canceled(request: CancelRequest) -> str:
    return f"canceled by {request.by}" + (f": {request.message}" if request.message else "")


def is_rescheduled(plan: GroupPlan, group: GroupRecord, cause: Cause) -> bool:
    """Return whether the spec requires another attempt after this failure, regardless of the number of attempts."""
    actions, task = plan.launch(cause.task).exit_actions, group.task(cause.task)
    # If the cause has the reason DATA and its task has not, an output failed: its code is 2012, even if the task never started.
    has_run = task.started_at is not None or task.reason is not Reason.DATA
    return action_of(actions, cause.reason, cause.exit_code, cause.signal, has_run=has_run) is Action.RESCHEDULE


def next_attempt(plan: GroupPlan, group: GroupRecord, cause: Cause, now: float) -> GroupRecord | None:
    """Return the next attempt of an ended group, as it waits for nodes; ``None`` after the last attempt."""
    if group.attempt >= plan.retry.limit:
        return None
    attempt = group.attempt + 1
    wait_s = plan.retry.wait_s(attempt)
    return GroupRecord(
        name=group.name,
        upstream=group.upstream,
        state=State.SCHEDULING,
        message=next_attempt_text(attempt + 1, plan.retry.limit + 1, wait_s),
        attempt=attempt,
        transfer_results=inherited_results(group),
        checkpoints=group.checkpoints,
        earlier=(*group.earlier, *(replace(task, state=State.RESCHEDULED) for task in group.tasks)),
        earlier_causes=(*group.earlier_causes, cause),
        tasks=fresh_tasks(plan, attempt, State.SCHEDULING),
        # The backoff does not count as waiting for nodes.
        scheduling_at=now + wait_s,
        backoff_until=now + wait_s,
    )
