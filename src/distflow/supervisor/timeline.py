"""The events of a group's attempt, in the order of the supervisor's clock. This module does no I/O."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from msgspec import Struct

from distflow.lifecycle.exits import exit_text
from distflow.lifecycle.states import REASON_TEXT, Reason, State
from distflow.state.event_details import NodeBecameReachable, NodeBecameUnreachable
from distflow.state.record import Cause, End, EventRecord, GroupRecord, TaskRecord
from distflow.supervisor.error_reports import failure_report

__all__ = ["Moment", "attempt_of", "cause_of", "moments", "show_end"]


class Moment(Struct, frozen=True, kw_only=True):
    """An entry of the timeline: an event of a node, a task or the whole group."""

    at: float
    """By the supervisor's clock."""
    node: str = ""
    task: str = ""
    text: str
    because: str = ""
    """The reason; empty if none is needed or known."""


def cause_of(group: GroupRecord, attempt: int) -> Cause | None:
    """Return the first cause of one of a group's attempts; ``None`` if none was recorded, as after a cancel or a timeout."""
    if attempt < len(group.earlier_causes):
        return group.earlier_causes[attempt]
    return group.cause


def attempt_of(group: GroupRecord, attempt: int) -> tuple[TaskRecord, ...]:
    """Return the tasks of one of a group's attempts."""
    return tuple(task for task in group.attempts if task.attempt == attempt)


def moments(
    group: GroupRecord, attempt: int, events: Sequence[EventRecord], lines: Mapping[str, tuple[str, ...]]
) -> tuple[Moment, ...]:
    """Return the timeline of an attempt of a group, in order.

    ``events`` are the events of the workflow. Of these, the timeline contains only outages of the attempt's nodes, from its
    first to its last other entry. ``lines`` are the last lines of each task's output.
    """
    tasks, cause = attempt_of(group, attempt), cause_of(group, attempt)
    found = [moment for task in tasks for moment in _of_task(task, cause, lines.get(task.name, ()))]
    if attempt == group.attempt and group.stopping_at is not None:
        why = f"{cause.task} failed" if cause else REASON_TEXT.get(group.stop_reason, "") if group.stop_reason else ""
        found.append(Moment(at=group.stopping_at, text="the group is stopped", because=why))
    times = [moment.at for moment in found]
    for event in events:
        match event.details:
            case NodeBecameUnreachable(node=node, error=error):
                text = f"unreachable: {error.partition(chr(10))[0]}"
            case NodeBecameReachable(node=node):
                text = "reachable again"
            case _:
                continue
        if any(task.node == node for task in tasks) and times and min(times) <= event.at <= max(times):
            found.append(Moment(at=event.at, node=node, text=text))
    return tuple(sorted(found, key=lambda moment: moment.at))


def show_end(end: End) -> str:
    """Return how a command ended, such as ``SIGKILL`` or ``exit code 3``."""
    return exit_text(end.exit_code, end.signal) or end.reason.value.replace("_", " ")


def _of_task(task: TaskRecord, cause: Cause | None, lines: tuple[str, ...]) -> Iterator[Moment]:
    node = task.node or ""
    if task.started_at is not None:
        pid = f" (pid {task.pid})" if task.pid is not None else ""
        yield Moment(at=task.started_at, node=node, task=task.name, text=f"started{pid}")
    end = task.end
    if end is not None and end.stopped_at is not None and end.started_at is not None:
        yield Moment(at=end.stopped_at, node=node, task=task.name, text="asked to stop", because=_stop_cause(task, cause))
    if task.ended_at is not None:
        text = "lost" if task.reason is Reason.NODE_LOST else f"ended: {show_end(end)}" if end else "ended"
        yield Moment(at=task.ended_at, node=node, task=task.name, text=text, because=_end_cause(task, cause, lines))


def _end_cause(task: TaskRecord, cause: Cause | None, lines: tuple[str, ...]) -> str:
    if cause is not None and task.name == cause.task:
        return "the first cause"
    if cause is not None and task.name in cause.rivals:
        return f"failed by itself, at the same time as {cause.task} as far as the clocks can tell"
    if task.reason is Reason.PEER_FAILED:
        return _stop_cause(task, cause)
    if task.state is State.COMPLETED:
        return "completed" if task.end is not None and task.end.is_success else task.message
    if task.reason in (Reason.EXIT_CODE, Reason.SIGNAL) and failure_report(task.end, lines).is_symptom:
        return "it reports that a peer was gone"
    if task.reason in (Reason.EXIT_CODE, Reason.SIGNAL, Reason.OOM_KILLED):
        return "failed by itself, after the first cause" if cause is not None else "failed by itself"
    return REASON_TEXT[task.reason] if task.reason is not None else ""


def _stop_cause(task: TaskRecord, cause: Cause | None) -> str:
    if cause is not None and task.name == cause.task:
        return "other tasks ended sooner"
    if task.reason is Reason.PEER_FAILED and cause is not None:
        return f"{cause.task} failed"
    return REASON_TEXT[task.reason] if task.reason is not None else task.message
