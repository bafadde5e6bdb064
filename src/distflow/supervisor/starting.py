"""A group before it runs: what it waits for, the time it may wait, and the two phases of its start. Pure."""

from __future__ import annotations

from dataclasses import replace

from distflow.documents.quantities import seconds_text
from distflow.lifecycle.states import Reason, State
from distflow.lifecycle.upstream import broken_upstream, still_awaited, waits_for
from distflow.state.event_details import GroupStatus
from distflow.state.fresh import fresh_tasks
from distflow.state.record import TaskRecord
from distflow.supervisor.carrying import Carriage, carry_in
from distflow.supervisor.commands import Prepare, Release, Start
from distflow.supervisor.observations import REFUSED, end_unstarted
from distflow.supervisor.step import Step

__all__ = ["Starting"]


class Starting(Step):
    """The steps of a group that does not run yet."""

    # WAITING: until every group upstream has completed, and its data is here.

    def _waiting(self) -> None:
        states = {group.name: group.state for group in self.record.groups}
        broken = broken_upstream(self.plan.upstream, states)
        if broken is not None:
            message = f"{broken}, which it depends on, did not complete: {self.record.group(broken).status}"
            self._end_unstarted(State.FAILED, Reason.UPSTREAM, message)
            return
        awaited = still_awaited(self.plan.upstream, states)
        data = Carriage() if awaited else carry_in(self.plan, self.record, self.group)
        self._give(data.commands)
        if data.failed is not None:
            self._end_unstarted(State.FAILED, data.failed.reason, f"{data.failed.task}: {data.failed.message}")
            return
        message = waits_for(awaited) if awaited else data.message
        if message:
            self._say(message)
            return
        self.group = replace(self.group, tasks=tuple(replace(task, state=State.SCHEDULING) for task in self.group.tasks))
        self._become(State.SCHEDULING, scheduling_at=self.now, message="")

    # SCHEDULING: until there are nodes, which is `queue`'s to say.

    def _scheduling(self) -> None:
        limit, since = self.plan.timeouts.queue_s, self.group.scheduling_at
        if limit is None or since is None:
            return
        if self._is_leasing:
            return
        if self.now >= since + limit:
            waited = f"waited {seconds_text(limit)} for nodes (queue_timeout)"
            message = f"{waited}; last: {self.group.waits_for or self.group.message}" if self.group.message else waited
            self._end_unstarted(State.FAILED, Reason.QUEUE_TIMEOUT, message)
        else:
            self.decision.wake(since + limit)

    # INITIALIZING: prepare everywhere, then start everywhere.

    def _initializing(self) -> None:
        relayed = self._relay()
        group = self.group
        refused = [
            task
            for task in group.tasks
            if (task.reason in REFUSED or task.state is State.FAILED)
            and (task.started_at is None or self.plan.counts(task.name))
        ]
        if refused:
            self._stop(Reason.PEER_FAILED, f"{refused[0].name}: {refused[0].message}")
            return
        given_back = [task for task in group.tasks if task.state is State.SCHEDULING or task.reason is Reason.START_TIMEOUT]
        started = [task for task in group.tasks if task.state is State.RUNNING or task.state.is_final]
        if given_back and not started:
            self._withdraw()
            return
        if given_back:
            self._stop(Reason.START_TIMEOUT, f"{given_back[0].name} lost its lease while others were starting")
            return
        if len(started) == len(group.tasks):
            self._become(State.RUNNING, running_at=min(task.started_at or self.now for task in started))
            return
        barrier_s = self.pool.start_barrier_s if self.pool else 120.0
        moved_at = [task.transfer.at for task in group.tasks if task.transfer is not None]
        moved_at += [one.at for one in group.carried]
        deadline = max([group.initializing_at or self.now, *moved_at]) + barrier_s
        if self.now >= deadline and group.withdrawing is False:
            late = ", ".join(_late(task) for task in group.tasks if not task.prepared or task.out_of_reach) or "its nodes"
            self._stop(Reason.START_TIMEOUT, f"not ready within {seconds_text(barrier_s)}: {late}")
            return
        self.decision.wake(deadline)
        # One that cannot be told to start keeps the others from it: they would only wait for it, and hold their GPUs.
        waiting = [task for task in group.tasks if task.state is State.INITIALIZING]
        ready = all(task.prepared and not self._unreachable(task) for task in waiting)
        for task in group.tasks:
            if task.state is not State.INITIALIZING:
                continue
            if not task.prepared:
                if relayed:
                    self._command(Prepare, task)
            elif ready or not self.plan.starts_as_one:
                self._command(Start, task)

    def _relay(self) -> bool:
        """Fetch what a node could not fetch by itself; return whether everything that is to be relayed is here."""
        data = carry_in(self.plan, self.record, self.group)
        self._give(data.commands)
        if data.failed is not None:
            task = self.group.task(data.failed.task)
            self.group = self.group.with_task(replace(task, reason=data.failed.reason, message=data.failed.message))
        return not data.commands

    def _withdraw(self) -> None:
        """Give back what is left of a lost lease, then queue again."""
        held = [task for task in self.group.tasks if task.state is State.INITIALIZING]
        if held:
            self.group = replace(self.group, withdrawing=True)
            for task in held:
                self._command(Release, task)
            return
        tasks = fresh_tasks(self.plan, self.group.attempt, State.SCHEDULING)
        # While it had nodes, it did not wait for any.
        had_s = max(0.0, self.now - (self.group.initializing_at or self.now))
        self.group = replace(
            self.group, tasks=tasks, left_out=(), binding=None, withdrawing=False, initializing_at=None, waits_for="",
            scheduling_at=(self.group.scheduling_at or self.now) + had_s,
        )  # fmt: skip
        self._become(State.SCHEDULING, message="its lease was lost before the start; queued again", not_before=self.now + 1.0)

    def _end_unstarted(self, state: State, reason: Reason, message: str) -> None:
        self.group = end_unstarted(self.group, state, reason, message, self.now)
        self._tell(GroupStatus(status=self.group.status, message=message))


def _late(task: TaskRecord) -> str:
    return f"{task.name} on {task.node}" + (", which is unreachable" if task.out_of_reach else "")
