"""Build the outcome of a group from records and log lines, find the rules that match, and choose those closest to the cause.

This module does no I/O.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from msgspec import Struct

from distflow.diagnosis.ends import HIDDEN, by_ends, by_kernel
from distflow.diagnosis.model import Diagnosis, FirstFailure, GroupOutcome, Hit, Level, TaskOutcome, hits_in
from distflow.diagnosis.rules import EXCEPTION, PEER_DIED, RULES, Rule
from distflow.state.event_details import HangOver, HangSuspected
from distflow.state.event_text import hang_text
from distflow.state.record import Cause, EventRecord, GroupRecord, TaskRecord
from distflow.structs import replace
from distflow.supervisor.error_reports import failure_report, hidden_failure_report, without_launcher
from distflow.supervisor.failures import MissingRanks, missing_ranks
from distflow.supervisor.timeline import attempt_of, cause_of

__all__ = ["diagnose", "group_outcome_of"]


_LONGEST_LINE = 500
_FRAME = re.compile(r' *File "(.+)", line (\d+)')
_LIBRARY = re.compile(r"^<frozen |/(?:site|dist)-packages/|/lib(?:64)?/python3")


class _Match(Struct, frozen=True):
    """A rule that matches, the lines that it matches, and the details that it finds in them."""

    rule: Rule
    hits: tuple[Hit, ...]
    details: str

    def is_from(self, task: str) -> bool:
        """Whether one of the lines is from that task's output or from its node's kernel log."""
        return any(hit.outcome.task == task for hit in self.hits)

    def explains(self, first: FirstFailure) -> bool:
        """Whether the rule explains the first failure better than the traceback of that failure.

        Another rank of the task may have printed lines about waiting or a lost peer. They count only if the traceback has them.
        """
        if self.rule.level is Level.CAUSE:
            return self.is_from(first.task)
        return any(pattern.search(line) for line in first.traceback.splitlines() for pattern in self.rule.patterns)


def diagnose(group: GroupOutcome) -> tuple[Diagnosis, ...]:
    """Return the diagnoses of a group's attempt; empty if nothing shows a cause.

    If the task that failed first has the reason ``OOM_KILLED``, the lack of memory is the only diagnosis. Otherwise, lines
    about waiting count only if no line names a cause, and lines about a lost peer only if nothing else shows a cause. Of
    lines of the same kind, those of the task that failed first exclude all others. If no rule explains the failure of that
    task, its exception or other end is the cause: the other tasks only lost the connection to it.
    """
    killed = by_kernel(group)
    if killed is not None:
        return (killed,)
    matches = _matches(group)
    ended = by_ends(group)
    first = group.first.task if group.first else None
    if group.first is not None and group.first.traceback:
        if not any(one.explains(group.first) for one in matches):
            return (_exception(group, group.first, matches), *(one for one in ended if one.key == HIDDEN.key))
    elif first is not None and matches and not any(one.is_from(first) for one in matches):
        return (*ended, _peer_died(group, matches))
    for level in Level:
        found = [one for one in matches if one.rule.level is level]
        chosen = [one for one in found if first is not None and one.is_from(first)] or found
        if level is Level.CAUSE and chosen:
            return (*(_diagnosis(group, one) for one in chosen), *(one for one in ended if one.key == HIDDEN.key))
        if level is Level.STALL and chosen:
            return (*ended, *(_diagnosis(group, one) for one in chosen))
        if level is Level.BYSTANDER and not ended:
            return tuple(_diagnosis(group, one) for one in chosen)
    return ended


def _matches(group: GroupOutcome) -> list[_Match]:
    """Return the rules that match. Each line counts only for the first rule that it matches."""
    found: list[_Match] = []
    taken: set[tuple[str, str]] = set()
    for rule in RULES:
        hits = tuple(
            hit
            for outcome in group.outcomes
            for hit in hits_in(outcome, rule.patterns)
            if (outcome.task, hit.line) not in taken
        )
        details = rule.explain(group, hits) if hits else None
        if details is not None:
            found.append(_Match(rule, hits, details))
            taken.update((hit.outcome.task, hit.line) for hit in hits)
    return found


def _diagnosis(group: GroupOutcome, match: _Match) -> Diagnosis:
    first = group.first.task if group.first else None
    # Quote the last matching line of the task that failed first, or else the first matching line.
    hit = next((hit for hit in reversed(match.hits) if hit.outcome.task == first), match.hits[0])
    rule = match.rule
    return Diagnosis(
        key=rule.key, cause=rule.cause, found=match.details, remedy=rule.remedy, task=hit.outcome.task, line=_cut(hit.line)
    )


def _exception(group: GroupOutcome, first: FirstFailure, matches: list[_Match]) -> Diagnosis:
    """Return a diagnosis with the rank or task, its exception, and the ranks or tasks that lost the connection."""
    raised = _raised_text(first.traceback)
    logs = f"logs <id> --rank {first.rank}" if first.rank.isdigit() else "logs <id>"
    return Diagnosis(
        key=EXCEPTION.key,
        cause=EXCEPTION.cause,
        found=f"{_who_failed(group, first)} raised {raised}{_peers_text(group, first, matches)}",
        remedy=EXCEPTION.remedy.replace("logs <id>", logs),
        task=first.task,
        traceback=first.traceback,
    )


def _raised_text(traceback: str) -> str:
    """Return the first line of a traceback's last message, and the last frame outside libraries (else the last frame)."""
    lines = traceback.splitlines()
    frames = [(number, match) for number, line in enumerate(lines) if (match := _FRAME.match(line))]
    after = lines[frames[-1][0] + 1 :] if frames else lines
    message = next((line for line in after if line and not line[0].isspace()), lines[-1])
    places = [match for _, match in frames]
    place = next((one for one in reversed(places) if not _LIBRARY.search(one[1])), places[-1] if places else None)
    return f"{_cut(message)} ({place[1]}, line {place[2]})" if place else _cut(message)


def _who_failed(group: GroupOutcome, first: FirstFailure) -> str:
    place = next((one.place for one in group.outcomes if one.task == first.task), first.task)
    return f"rank {first.rank} ({place})" if first.rank.isdigit() else place


def _peers_text(group: GroupOutcome, first: FirstFailure, matches: list[_Match]) -> str:
    others = dict.fromkeys(hit.who for one in matches if one.rule.level is not Level.CAUSE for hit in one.hits)
    others.pop(_who_failed(group, first), None)
    return f"; {', '.join(others)} then lost the connection" if others else ""


def _peer_died(group: GroupOutcome, matches: list[_Match]) -> Diagnosis:
    """Return a diagnosis with the rank or task that failed first, and the ranks or tasks that lost the connection."""
    assert group.first is not None  # noqa: S101  (the caller has checked)
    task = group.first.task
    peers = _peers_text(group, group.first, matches)
    last = next((line for one in group.outcomes if one.task == task for line in reversed(one.lines) if line.strip()), "")
    return Diagnosis(
        key=PEER_DIED.key,
        cause=PEER_DIED.cause,
        found=f"{_who_failed(group, group.first)} failed first: {group.first.message}{peers}",
        remedy=PEER_DIED.remedy,
        task=task,
        line=_cut(last),
    )


def _cut(line: str) -> str:
    line = line.strip()
    return line if len(line) <= _LONGEST_LINE else f"{line[:_LONGEST_LINE]} …"


# -- the outcome of a group --------------------------------------------------------------------------------------------

_LINES = 300
"""The maximum number of lines at the end of each task's output that the rules search. Those of torchrun do not count."""


def group_outcome_of(
    group: GroupRecord, attempt: int, lines: Mapping[str, Sequence[str]], events: Sequence[EventRecord]
) -> GroupOutcome:
    """Return the outcome of one attempt of a group.

    ``lines`` are the last lines of its tasks' output, by task. ``events`` are the events of the workflow, in order.
    """
    tasks, cause = attempt_of(group, attempt), cause_of(group, attempt)
    missing = missing_ranks(replace(group, tasks=tasks))
    first = _first_failure(cause, tasks, lines) if cause else None
    if first is None and missing is not None:
        first = _hidden_failure(missing, lines.get(missing.task.name, ()))
    return GroupOutcome(
        outcomes=tuple(_outcome(task, lines.get(task.name, ())) for task in tasks),
        first=first,
        hidden_failure=_hidden_failure_text(tasks, cause, missing),
        silence=_silence(group, tasks, events),
    )


def _hidden_failure(missing: MissingRanks, lines: Sequence[str]) -> FirstFailure:
    report = hidden_failure_report(lines)
    return FirstFailure(
        task=missing.task.name,
        rank=(report.rank if report else "") or missing.task.ranks,
        message=missing.message,
        rank_signal=report.signal if report else None,
        traceback=report.traceback if report else "",
    )


def _hidden_failure_text(tasks: Sequence[TaskRecord], cause: Cause | None, missing: MissingRanks | None) -> str:
    """Return a message about ranks that failed although their task ended with code 0; empty if there are none.

    Either other ranks still wait for them (``missing``), or the group has ended.
    """
    if missing is not None:
        return missing.message
    blamed = any(task.hidden_failure is not None for task in tasks if cause is not None and task.name == cause.task)
    return f"{cause.task} {cause.message}" if cause is not None and blamed else ""


def _first_failure(cause: Cause, tasks: Sequence[TaskRecord], lines: Mapping[str, Sequence[str]]) -> FirstFailure:
    traceback = cause.traceback
    if not traceback:
        # Earlier versions of distflow recorded first causes without searching the output for tracebacks.
        end = next((task.end for task in tasks if task.name == cause.task), None)
        traceback = failure_report(end, lines.get(cause.task, ())).traceback
    return FirstFailure(
        task=cause.task, rank=cause.ranks, message=cause.message, rank_signal=cause.rank_signal, traceback=traceback
    )


def _outcome(task: TaskRecord, lines: Sequence[str]) -> TaskOutcome:
    end = task.end
    return TaskOutcome(
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
    """Parse the ranks in a record, such as ``8-15`` or ``8``. An empty text gives an empty range."""
    first, _, last = text.partition("-")
    return range(int(first), int(last or first) + 1) if first else range(0)


def _error_lines(error: Mapping[str, object] | None) -> Sequence[str]:
    """Return the message in torch's error file, as lines."""
    message = (error or {}).get("message", "")
    if isinstance(message, Mapping):
        message = message.get("message", "")
    return str(message).splitlines()


def _silence(group: GroupRecord, tasks: Sequence[TaskRecord], events: Sequence[EventRecord]) -> str:
    """Return the last report of this attempt that the gang is silent; empty if there is none, or if the silence is over."""
    begun = min((task.started_at for task in tasks if task.started_at is not None), default=None)
    ended = max((task.ended_at for task in tasks if task.ended_at is not None), default=None)
    silence = ""
    for event in events:
        if event.group != group.name or begun is None or event.at < begun or (ended is not None and event.at > ended):
            continue
        if isinstance(event.details, HangSuspected):
            silence = hang_text(event.details.limit_s)
        elif isinstance(event.details, HangOver):
            silence = ""
    return silence
