"""The outputs that groups pass to dependent groups: which are needed, which cannot be had, and where they appear. Pure."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, replace

from distflow.backends.base import AttemptObservation, Collected, LeaseObservation
from distflow.lifecycle.states import Reason, State
from distflow.lifecycle.upstream import listed
from distflow.plan.model import BoundLaunch, Plan, PlannedFile
from distflow.plan.tokens import input_place
from distflow.spec.model import InputSpec
from distflow.state.record import Cause, GroupRecord, TaskRecord, WorkflowRecord
from distflow.supervisor.carrying import TransferEnded, TransferMoved, carry_out, relayed
from distflow.supervisor.commands import TransferData
from distflow.supervisor.world import NodeView

__all__ = ["Handover", "archives", "arrived", "hand_over", "place_inputs"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Handover:
    """The state of a group's outputs after all of its tasks have ended."""

    missing: tuple[TaskRecord, ...] = ()
    """Tasks whose output is needed here and has not arrived."""
    commands: tuple[TransferData, ...] = ()
    """Outputs to write to URLs, from here or by nodes."""
    message: str = ""
    """The remaining work as a message; empty if there is none."""
    failure: Cause | None = None
    """Why one of the outputs will never be available."""
    saved_at: float = 0.0
    """When the last output arrived or was written."""
    wake_at: float | None = None
    """When a node will have been unreachable for too long."""


def hand_over(
    plan: Plan,
    record: WorkflowRecord,
    group: GroupRecord,
    node_of: Callable[[TaskRecord], NodeView | None],
    lost_after_s: float,
    now: float,
) -> Handover:
    """Return what remains to be done with a group's outputs: fetch them for dependent groups, and write them to URLs."""
    planned = plan.group(group.name)
    handed_on = _wanted(plan, record)
    wanted = handed_on | relayed(planned, record, group)
    written = carry_out(planned, record, group)
    tasks = [task for task in group.tasks if task.name in wanted]
    missing = tuple(task for task in tasks if task.saved is None)
    needed = [task for task in group.tasks if task.name in wanted | written.on_nodes]
    unavailable = [cause for task in needed if (cause := _unavailable(task, node_of(task), lost_after_s, now)) is not None]
    away = {
        task.node: view
        for task in needed
        if (task in missing or task.name in written.on_nodes) and (view := node_of(task)) is not None and not view.up
    }
    return Handover(
        missing=missing,
        commands=written.commands,
        message=_waiting_message(missing, away, handed_on) if missing else _with_away(written.message, away),
        failure=unavailable[0] if unavailable else written.failed,
        saved_at=max([written.at, *(task.saved.at for task in tasks if task.saved is not None)]),
        wake_at=min((view.since + lost_after_s for view in away.values()), default=None),
    )


def place_inputs(launch: BoundLaunch, inputs: Sequence[InputSpec], record: WorkflowRecord) -> BoundLaunch:
    """Return the launch with its inputs as archives to unpack; all groups that produce them have completed."""
    saved = {task.name: task.saved for group in record.groups for task in group.tasks}
    files = []
    for one in inputs:
        found = saved[one.task]
        if found is None:
            raise AssertionError("a group completes when what it hands on is here")
        files.append(
            PlannedFile(
                path=input_place(one.position), shown=f"what {one.task} wrote", blob=found.digest, size=found.size, mode=0o700,
                is_tar=True, only=one.regex,
            )
        )  # fmt: skip
    return replace(launch, files=(*launch.files, *files))


def archives(record: WorkflowRecord) -> frozenset[str]:
    """Return the archives (SHA-256) of a workflow's outputs, checkpoints and fetched inputs."""
    saved = {task.saved.digest for group in record.groups for task in group.attempts if task.saved and task.saved.digest}
    carried = {one.digest for group in record.groups for one in group.carried if one.digest}
    checkpoints = {one.digest for group in record.groups for one in group.checkpoints if one.digest}
    return frozenset(saved | carried | checkpoints)


def arrived(seen: LeaseObservation | AttemptObservation | TransferMoved | TransferEnded) -> frozenset[str]:
    """Return the archive (SHA-256) whose arrival an observation reports; empty for any other observation."""
    outcome = seen.outcome if isinstance(seen, TransferEnded) else seen if isinstance(seen, Collected) else None
    return frozenset({outcome.digest} - {""}) if outcome is not None else frozenset()


def _wanted(plan: Plan, record: WorkflowRecord) -> frozenset[str]:
    """Return the tasks whose output a waiting group uses as its input."""
    waiting = [group for group in plan.groups if record.group(group.name).state is State.WAITING]
    return frozenset(one.task for group in waiting for launch in group.launches for one in launch.inputs)


def _unavailable(task: TaskRecord, view: NodeView | None, lost_after_s: float, now: float) -> Cause | None:
    reason, words = Reason.DATA, ""
    if task.saved is not None:
        words = task.saved.error
    elif task.node is None:
        words = "it was never started, so it has no output"
    elif view is not None and not view.up and now >= view.since + lost_after_s:
        reason = Reason.NODE_LOST
        words = f"{task.node} has been unreachable for {now - view.since:.0f} s: {view.error}"
    if not words:
        return None
    message = f"its output cannot be handed on: {words}"
    return Cause(task=task.name, reason=reason, message=message, at=now, node=task.node, ranks=task.ranks)


def _waiting_message(missing: Sequence[TaskRecord], away: dict[str | None, NodeView], handed_on: Container[str]) -> str:
    why = "for the groups that wait" if any(task.name in handed_on for task in missing) else "to be written to its URL"
    return _with_away(f"all tasks have ended; what {listed([task.name for task in missing])} wrote is fetched {why}", away)


def _with_away(words: str, away: dict[str | None, NodeView]) -> str:
    return "; ".join([words, *(f"{name} is unreachable: {view.error}" for name, view in away.items() if view.error)])
