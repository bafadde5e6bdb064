"""Rebuild a workflow from the records on its nodes, for a store that does not know it. Pure.

The nodes keep the record as it was when the latest attempt was prepared. The supervisor asks the nodes for everything that
happened later, as it does after every restart. This module only brings the record into a state from which the supervisor can
ask. It never starts anything, because the submitter may still be running elsewhere: groups that had not begun are ended, and
no attempt is followed by another one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace

from distflow.lifecycle.states import Reason, State
from distflow.plan.model import Binding, GroupPlan, Plan
from distflow.protocol.attempts import attempt_name
from distflow.state.record import GroupRecord, TaskRecord, WorkflowRecord
from distflow.supervisor.memo import Memo
from distflow.supervisor.observations import end_unstarted

__all__ = ["Place", "Rebuilt", "is_starting", "latest", "rebuild"]

_BEGUN = (State.INITIALIZING, State.RUNNING, State.STOPPING)
_UNSTARTED = "it had not been started when the workflow was adopted"


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """An attempt that was found on a node; the node has its name in the adopting pool."""

    node: str
    phase: str
    """The phase in the agent protocol's ``status``."""
    pid: int | None = None
    started_at: float | None = None
    directory: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rebuilt:
    """A workflow that can be stored."""

    record: WorkflowRecord
    plan: Plan
    notes: tuple[str, ...]
    """What could not be recovered, one message for each item."""


def latest(memos: Iterable[Memo]) -> Memo:
    """Return the memo that shows the most progress. The nodes' clocks are not compared: a workflow only moves forward."""

    def progress(memo: Memo) -> tuple[int, int, int, int]:
        groups = memo.record.groups
        return (
            sum(group.attempt for group in groups),
            sum(group.state.is_final for group in groups),
            sum(group.state in _BEGUN for group in groups),
            sum(task.state.is_final or task.prepared for group in groups for task in group.tasks),
        )

    return max(memos, key=progress)


def is_starting(record: WorkflowRecord, places: Mapping[str, Place]) -> bool:
    """Return whether a gang of the workflow is starting, or its start was abandoned a moment ago. Both states are temporary."""
    names = {
        attempt_name(record.uuid, group.name, task.name, task.attempt)
        for group in record.groups
        for task in group.tasks
        if group.state in _BEGUN
    }
    return any(name in names and place.phase in ("leased", "prepared") for name, place in places.items())


def rebuild(memo: Memo, places: Mapping[str, Place], *, nodes: Collection[str], now: float) -> Rebuilt:
    """Return the workflow in a form that a supervisor can continue with.

    ``places`` are its attempts that were found, by name. ``nodes`` are the nodes of the pool.
    """
    record = memo.record
    notes: list[str] = []
    groups: list[GroupRecord] = []
    for group in record.groups:
        adopted = _group(record, group, places, nodes, now)
        groups.append(adopted)
        if not group.state.is_final and not _has_begun(group):
            notes.append(f"{group.name} {_UNSTARTED}: `distflow workflow restart` runs it")
        was_over = {task.name for task in group.tasks if task.state.is_final}
        if _has_begun(group):
            gone = [one for one in adopted.tasks if one.reason is Reason.NODE_LOST and one.name not in was_over]
            notes += [f"{task.name}: {task.message}" for task in gone]
    secret = sorted({name for group in memo.plan.groups for launch in group.launches for name in launch.secret_names})
    if secret:
        notes.append(f"the values of --set-env are gone ({', '.join(secret)}): a restart needs them again")
    if any(launch.exit_actions.reschedule for group in memo.plan.groups for launch in group.launches):
        notes.append("a group that fails is not tried again from here")
    plan = replace(memo.plan, groups=tuple(_without_retries(one) for one in memo.plan.groups))
    return Rebuilt(record=replace(record, groups=tuple(groups)), plan=plan, notes=tuple(notes))


def _without_retries(plan: GroupPlan) -> GroupPlan:
    smaller = tuple(_without_retries(one) for one in plan.smaller)
    return replace(plan, retry=replace(plan.retry, limit=0), smaller=smaller)


def _group(
    record: WorkflowRecord, group: GroupRecord, places: Mapping[str, Place], nodes: Collection[str], now: float
) -> GroupRecord:
    def place_of(task: TaskRecord) -> Place | None:
        return places.get(attempt_name(record.uuid, group.name, task.name, task.attempt))

    def over(task: TaskRecord) -> TaskRecord:
        """Return an attempt that had ended; its output is mirrored again if a node still has it."""
        place = place_of(task)
        return replace(task, log_complete=True) if place is None else replace(task, node=place.node, log_complete=False)

    earlier = tuple(over(task) for task in group.earlier)
    if group.state.is_final:
        return replace(group, earlier=earlier, tasks=tuple(over(task) for task in group.tasks))
    if not _has_begun(group):
        ended = end_unstarted(group, State.FAILED, Reason.UPSTREAM, _UNSTARTED, now)
        return replace(ended, earlier=earlier, withdrawing=False)

    def begun(task: TaskRecord) -> TaskRecord:
        if task.state.is_final:
            return over(task)
        place = place_of(task)
        state = State.STOPPING if group.state is State.STOPPING else State.RUNNING
        if place is None and task.node not in nodes:
            return replace(
                task, state=State.FAILED, reason=Reason.NODE_LOST, message=_no_node(task), ended_at=now, log_complete=True
            )
        if place is None:
            return replace(task, state=state, prepared=True, transfer=None, log_complete=False)
        return replace(
            task, state=state, reason=None, node=place.node, prepared=True, transfer=None, pid=place.pid,
            started_at=place.started_at, output_dir=f"{place.directory}/output", out_of_reach=None, log_complete=False,
        )  # fmt: skip

    tasks = tuple(begun(task) for task in group.tasks)
    times = [task.started_at for task in tasks if task.started_at is not None]
    return replace(
        group,
        state=State.STOPPING if group.state is State.STOPPING else State.RUNNING,
        message="",
        tasks=tasks,
        earlier=earlier,
        binding=_renamed(group.binding, tasks),
        running_at=group.running_at or min(times, default=now),
    )


def _has_begun(group: GroupRecord) -> bool:
    """Return whether processes of the group's attempt may exist."""
    return group.state in _BEGUN and not group.withdrawing


def _no_node(task: TaskRecord) -> str:
    return f"it ran on {task.node}, which is not a node of the pool that it was adopted into"


def _renamed(binding: Binding | None, tasks: Iterable[TaskRecord]) -> Binding | None:
    """Return the binding with the node names of the adopting pool."""
    if binding is None:
        return None
    names = {task.name: task.node for task in tasks}
    return replace(binding, tasks={name: replace(one, node=names.get(name) or one.node) for name, one in binding.tasks.items()})
