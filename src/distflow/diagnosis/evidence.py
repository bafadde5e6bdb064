"""Build a case for the rules from records and log lines. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from distflow.diagnosis.model import Case, First, Witness
from distflow.state.event_details import HangOver, HangSuspected
from distflow.state.event_text import hang_text
from distflow.state.record import Cause, Event, GroupRecord, TaskRecord
from distflow.supervisor.error_reports import failure_report, hidden_failure_report, without_launcher
from distflow.supervisor.failures import MissingRanks, missing_ranks
from distflow.supervisor.timeline import attempt_of, cause_of

__all__ = ["case_of"]

_LINES = 300
"""Lines of each task's output, from its end, that the rules are tried on."""


def case_of(group: GroupRecord, attempt: int, lines: Mapping[str, Sequence[str]], events: Sequence[Event]) -> Case:
    """Return one attempt of a group as a case.

    ``lines`` are the last lines of its tasks, by task. ``events`` are those of the workflow, in order.
    """
    tasks, cause = attempt_of(group, attempt), cause_of(group, attempt)
    missing = missing_ranks(replace(group, tasks=tasks))
    first = _first(cause, tasks, lines) if cause else None
    if first is None and missing is not None:
        first = _hidden(missing, lines.get(missing.task.name, ()))
    return Case(
        witnesses=tuple(_witness(task, lines.get(task.name, ())) for task in tasks),
        first=first,
        missing=_missing_text(tasks, cause, missing),
        silence=_silence(group, tasks, events),
    )


def _hidden(missing: MissingRanks, lines: Sequence[str]) -> First:
    told = hidden_failure_report(lines)
    return First(
        task=missing.task.name,
        rank=(told.rank if told else "") or missing.task.ranks,
        message=missing.message,
        rank_signal=told.signal if told else None,
        traceback=told.traceback if told else "",
    )


def _missing_text(tasks: Sequence[TaskRecord], cause: Cause | None, missing: MissingRanks | None) -> str:
    """Return a message about ranks that failed unnoticed: while others wait, or after that ended the group."""
    if missing is not None:
        return missing.message
    blamed = any(task.hidden_failure is not None for task in tasks if cause is not None and task.name == cause.task)
    return f"{cause.task} {cause.message}" if cause is not None and blamed else ""


def _first(cause: Cause, tasks: Sequence[TaskRecord], lines: Mapping[str, Sequence[str]]) -> First:
    traceback = cause.traceback
    if not traceback:
        # An earlier version wrote this verdict, without searching the output for tracebacks.
        end = next((task.end for task in tasks if task.name == cause.task), None)
        traceback = failure_report(end, lines.get(cause.task, ())).traceback
    return First(task=cause.task, rank=cause.ranks, message=cause.message, rank_signal=cause.rank_signal, traceback=traceback)


def _witness(task: TaskRecord, lines: Sequence[str]) -> Witness:
    end = task.end
    return Witness(
        task=task.name,
        node=task.node or "",
        ranks=_ranks(task.ranks),
        lines=(*without_launcher(lines)[-_LINES:], *_error_lines(end.error if end else None)),
        kernel=end.kernel if end else (),
        reason=task.reason,
        exit_code=end.exit_code if end else None,
        signal=end.signal if end else None,
    )


def _ranks(text: str) -> range:
    """Return the ranks that a record names: ``8-15``, ``8``, or none."""
    first, _, last = text.partition("-")
    return range(int(first), int(last or first) + 1) if first else range(0)


def _error_lines(error: Mapping[str, object] | None) -> Sequence[str]:
    """Return the message in torch's error file, as lines."""
    message = (error or {}).get("message", "")
    if isinstance(message, Mapping):
        message = message.get("message", "")
    return str(message).splitlines()


def _silence(group: GroupRecord, tasks: Sequence[TaskRecord], events: Sequence[Event]) -> str:
    """Return the last report about a silent gang, unless it printed again or the report is from another attempt."""
    begun = min((task.started_at for task in tasks if task.started_at is not None), default=None)
    ended = max((task.ended_at for task in tasks if task.ended_at is not None), default=None)
    said = ""
    for event in events:
        if event.group != group.name or begun is None or event.at < begun or (ended is not None and event.at > ended):
            continue
        if isinstance(event.details, HangSuspected):
            said = hang_text(event.details.limit_s)
        elif isinstance(event.details, HangOver):
            said = ""
    return said
