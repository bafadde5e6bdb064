"""What the policy of a group works with: the group as it becomes, and where commands, events and times to wake go."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from distflow.backends.base import AttemptKey
from distflow.lifecycle.states import Reason, State
from distflow.plan.model import GroupPlan
from distflow.pools.model import Pool
from distflow.state.event_details import EventDetails, GroupStatus, GroupWaiting
from distflow.state.record import Event, GroupRecord, TaskRecord, WorkflowRecord
from distflow.supervisor.commands import Command, CommandId, Lease
from distflow.supervisor.world import Decision, NodeView, Workflow, World, key_of

__all__ = ["Step"]


class Step:
    """One group's step: what it is, what is known, and where decisions go."""

    def __init__(
        self, world: World, workflow: Workflow, record: WorkflowRecord, group: GroupRecord, now: float, decision: Decision
    ) -> None:
        self.world = world
        self.record = record
        self.whole = workflow.plan
        self.group = group
        self.plan: GroupPlan = workflow.plan.group(group.name)
        self.pool: Pool | None = world.pools.get(record.pool_key)
        self.now = now
        self.decision = decision

    def _stop(self, reason: Reason | None, message: str) -> None:
        self._become(State.STOPPING, stop_reason=reason, stopping_at=self.now, message=message, withdrawing=False)

    def _become(self, state: State, **changes: object) -> None:
        before = self.group.state
        self.group = replace(self.group, state=state, **changes)  # type: ignore[arg-type]
        if state is not before:
            self._tell(GroupStatus(status=self.group.status, message=self.group.message))

    def _tell(self, details: EventDetails, task: TaskRecord | None = None) -> None:
        self.decision.events.append(
            Event(
                at=self.now, details=details, workflow=self.record.uuid, group=self.group.name,
                task=task.name if task else None, attempt=task.attempt if task else None,
            )
        )  # fmt: skip

    def _command(self, make: Callable[[str, AttemptKey], Command], task: TaskRecord) -> None:
        """Give the command that ``make`` returns for the pool and the task's attempt, if the task's node can be reached."""
        key, view = key_of(self.record, self.group, task), self._node(task)
        if key is not None and view is not None and view.up:
            self._give([make(self.record.pool_key, key)])

    def _give(self, commands: Iterable[Command]) -> None:
        self.decision.commands += [one for one in commands if one.identity not in self.world.in_flight]

    @property
    def _is_leasing(self) -> bool:
        """Whether the group's nodes have been asked for a lease and have not answered."""
        group = AttemptKey(workflow=self.record.uuid, group=self.group.name, task="", attempt=self.group.attempt, node="")
        return CommandId.of(Lease, group) in self.world.in_flight

    def _node(self, task: TaskRecord) -> NodeView | None:
        return self.world.nodes.get((self.record.pool_key, task.node)) if task.node else None

    def _unreachable(self, task: TaskRecord) -> bool:
        view = self._node(task)
        return view is not None and not view.up

    @property
    def _lost_after_s(self) -> float:
        return self.pool.node_lost_after_s if self.pool else 120.0

    def _say(self, message: str) -> None:
        """Say what it waits for, when that is news."""
        if self.group.message != message:
            self.group = replace(self.group, message=message)
            self._tell(GroupWaiting(message=message))

    def _lines(self) -> Mapping[str, tuple[str, ...]]:
        """Return the last lines of the tasks that failed."""
        return {task.name: self._last_lines(task) for task in self.group.tasks if task.state is State.FAILED}

    def _last_lines(self, task: TaskRecord) -> tuple[str, ...]:
        return self.world.lines.get((self.record.uuid, self.group.name, task.name), ())
