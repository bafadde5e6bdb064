"""Build a case from records and log lines, find the rules that match it, and choose the one that names the cause. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from distflow.diagnosis.ends import HIDDEN, by_kernel, by_other_ends
from distflow.diagnosis.model import Case, Diagnosis, First, Hit, Level, Witness, hits_in
from distflow.diagnosis.rules import EXCEPTION, PEER_DIED, RULES, Rule
from distflow.state.event_details import HangOver, HangSuspected
from distflow.state.event_text import hang_text
from distflow.state.record import Cause, Event, GroupRecord, TaskRecord
from distflow.structs import replace
from distflow.supervisor.error_reports import failure_report, hidden_failure_report, without_launcher
from distflow.supervisor.failures import MissingRanks, missing_ranks
from distflow.supervisor.timeline import attempt_of, cause_of

__all__ = ["case_of", "diagnose"]


_LONGEST_LINE = 500
_FRAME = re.compile(r' *File "(.+)", line (\d+)')
_LIBRARY = re.compile(r"^<frozen |/(?:site|dist)-packages/|/lib(?:64)?/python3")


@dataclass(frozen=True, slots=True)
class _Shown:
    """A rule that matches, and the lines that it matches."""

    rule: Rule
    hits: tuple[Hit, ...]
    words: str

    def is_of(self, task: str) -> bool:
        """Whether that task printed one of the lines."""
        return any(hit.witness.task == task for hit in self.hits)

    def explains(self, first: First) -> bool:
        """Whether it explains the first failure better than its traceback does.

        Another rank of the task may have printed lines about waiting and lost peers: they count only if the traceback has them.
        """
        if self.rule.level is Level.CAUSE:
            return self.is_of(first.task)
        return any(pattern.search(line) for line in first.traceback.splitlines() for pattern in self.rule.patterns)


def diagnose(case: Case) -> tuple[Diagnosis, ...]:
    """Return the diagnoses of a case, the most specific first; none if no rule matches.

    Lines that name a cause come before lines about waiting, and those before lines about a lost peer. The task that failed
    first comes before all others. If no rule matches its output, the exception that ended it is the cause, and the other
    tasks only lost their peer.
    """
    killed = by_kernel(case)
    if killed is not None:
        return (killed,)
    shown = _shown(case)
    ended = by_other_ends(case)
    first = case.first.task if case.first else None
    if case.first is not None and case.first.traceback:
        if not any(one.explains(case.first) for one in shown):
            return (_exception(case, case.first, shown), *(one for one in ended if one.key == HIDDEN.key))
    elif first is not None and shown and not any(one.is_of(first) for one in shown):
        return (*ended, _peer_died(case, shown))
    for level in Level:
        found = [one for one in shown if one.rule.level is level]
        chosen = [one for one in found if first is not None and one.is_of(first)] or found
        if level is Level.CAUSE and chosen:
            return (*(_diagnosis(case, one) for one in chosen), *(one for one in ended if one.key == HIDDEN.key))
        if level is Level.STALL and chosen:
            return (*ended, *(_diagnosis(case, one) for one in chosen))
        if level is Level.BYSTANDER and not ended:
            return tuple(_diagnosis(case, one) for one in chosen)
    return ended


def _shown(case: Case) -> list[_Shown]:
    """Return the rules that match. Each line counts only for the most specific rule."""
    found: list[_Shown] = []
    taken: set[tuple[str, str]] = set()
    for rule in RULES:
        hits = tuple(
            hit
            for witness in case.witnesses
            for hit in hits_in(witness, rule.patterns)
            if (witness.task, hit.line) not in taken
        )
        words = rule.explain(case, hits) if hits else None
        if words is not None:
            found.append(_Shown(rule, hits, words))
            taken.update((hit.witness.task, hit.line) for hit in hits)
    return found


def _diagnosis(case: Case, shown: _Shown) -> Diagnosis:
    first = case.first.task if case.first else None
    # The last line of the task that failed first, else the first line of another task.
    hit = next((hit for hit in reversed(shown.hits) if hit.witness.task == first), shown.hits[0])
    rule = shown.rule
    return Diagnosis(
        key=rule.key, cause=rule.cause, found=shown.words, remedy=rule.remedy, task=hit.witness.task, line=_cut(hit.line)
    )


def _exception(case: Case, first: First, shown: list[_Shown]) -> Diagnosis:
    """Return a diagnosis with the rank, its exception, and the place."""
    raised = _raised_text(first.traceback)
    logs = f"logs <id> --rank {first.rank}" if first.rank.isdigit() else "logs <id>"
    return Diagnosis(
        key=EXCEPTION.key,
        cause=EXCEPTION.cause,
        found=f"{_who_failed(case, first)} raised {raised}{_lost(shown)}",
        remedy=EXCEPTION.remedy.replace("logs <id>", logs),
        task=first.task,
        traceback=first.traceback,
    )


def _raised_text(traceback: str) -> str:
    """Return the first line of a traceback's last message, and the last frame outside libraries."""
    lines = traceback.splitlines()
    frames = [(number, match) for number, line in enumerate(lines) if (match := _FRAME.match(line))]
    after = lines[frames[-1][0] + 1 :] if frames else lines
    message = next((line for line in after if line and not line[0].isspace()), lines[-1])
    places = [match for _, match in frames]
    place = next((one for one in reversed(places) if not _LIBRARY.search(one[1])), places[-1] if places else None)
    return f"{_cut(message)} ({place[1]}, line {place[2]})" if place else _cut(message)


def _who_failed(case: Case, first: First) -> str:
    place = next((one.place for one in case.witnesses if one.task == first.task), first.task)
    return f"rank {first.rank} ({place})" if first.rank.isdigit() else place


def _lost(shown: list[_Shown]) -> str:
    others = dict.fromkeys(hit.who for one in shown if one.rule.level is not Level.CAUSE for hit in one.hits)
    return f"; {', '.join(others)} then lost the connection" if others else ""


def _peer_died(case: Case, shown: list[_Shown]) -> Diagnosis:
    """Return a diagnosis with the rank that failed first, and the ranks that lost it."""
    assert case.first is not None  # noqa: S101  (the caller has checked)
    task = case.first.task
    last = next((line for one in case.witnesses if one.task == task for line in reversed(one.lines) if line.strip()), "")
    return Diagnosis(
        key=PEER_DIED.key,
        cause=PEER_DIED.cause,
        found=f"{_who_failed(case, case.first)} failed first: {case.first.message}{_lost(shown)}",
        remedy=PEER_DIED.remedy,
        task=task,
        line=_cut(last),
    )


def _cut(line: str) -> str:
    line = line.strip()
    return line if len(line) <= _LONGEST_LINE else f"{line[:_LONGEST_LINE]} …"


# -- the case ---------------------------------------------------------------------------------------------------------

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
    silence = ""
    for event in events:
        if event.group != group.name or begun is None or event.at < begun or (ended is not None and event.at > ended):
            continue
        if isinstance(event.details, HangSuspected):
            silence = hang_text(event.details.limit_s)
        elif isinstance(event.details, HangOver):
            silence = ""
    return silence
