"""Which rules a case fulfils, and which of them tells the cause. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass

from distflow.diagnosis.ends import HIDDEN, by_kernel, by_other_ends
from distflow.diagnosis.model import Case, Diagnosis, First, Hit, Level, hits_in
from distflow.diagnosis.rules import EXCEPTION, PEER_DIED, RULES, Rule

__all__ = ["diagnose"]

_LONGEST_LINE = 500
_FRAME = re.compile(r' *File "(.+)", line (\d+)')
_LIBRARY = re.compile(r"^<frozen |/(?:site|dist)-packages/|/lib(?:64)?/python3")


@dataclass(frozen=True, slots=True)
class _Shown:
    """A rule that is fulfilled, and by which lines."""

    rule: Rule
    hits: tuple[Hit, ...]
    words: str

    def is_of(self, task: str) -> bool:
        """Whether that task printed one of the lines."""
        return any(hit.witness.task == task for hit in self.hits)

    def explains(self, first: First) -> bool:
        """Whether it says more of the first failure than its traceback does.

        Of waiting and of lost peers another rank of the task may have printed: they count where the traceback shows them.
        """
        if self.rule.level is Level.CAUSE:
            return self.is_of(first.task)
        return any(pattern.search(line) for line in first.traceback.splitlines() for pattern in self.rule.patterns)


def diagnose(case: Case) -> tuple[Diagnosis, ...]:
    """Return what a case shows, the most specific first; nothing when no rule knows it.

    What names a cause is believed before what tells of waiting, and that before what tells of a lost peer; and the first
    task to fail before all others. Where its own words are of none of these, the exception that ended it is the cause, and
    the others only lost it.
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
        said = [one for one in shown if one.rule.level is level]
        chosen = [one for one in said if first is not None and one.is_of(first)] or said
        if level is Level.CAUSE and chosen:
            return (*(_diagnosis(case, one) for one in chosen), *(one for one in ended if one.key == HIDDEN.key))
        if level is Level.STALL and chosen:
            return (*ended, *(_diagnosis(case, one) for one in chosen))
        if level is Level.BYSTANDER and not ended:
            return tuple(_diagnosis(case, one) for one in chosen)
    return ended


def _shown(case: Case) -> list[_Shown]:
    """Return the rules that are fulfilled. A line speaks for the most specific of them only."""
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
    # The last word of the first to fail, else the first word of another.
    hit = next((hit for hit in reversed(shown.hits) if hit.witness.task == first), shown.hits[0])
    rule = shown.rule
    return Diagnosis(
        key=rule.key, cause=rule.cause, found=shown.words, remedy=rule.remedy, task=hit.witness.task, line=_cut(hit.line)
    )


def _exception(case: Case, first: First, shown: list[_Shown]) -> Diagnosis:
    """Say which rank raised what, and where."""
    raised = _raised_text(first.traceback)
    return Diagnosis(
        key=EXCEPTION.key,
        cause=EXCEPTION.cause,
        found=f"{_who_failed(case, first)} raised {raised}{_lost(shown)}",
        remedy=EXCEPTION.remedy,
        task=first.task,
        traceback=first.traceback,
    )


def _raised_text(traceback: str) -> str:
    """Return the first line of a traceback's last message, and the last frame that is no library's."""
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
    return f"; {', '.join(others)} lost it" if others else ""


def _peer_died(case: Case, shown: list[_Shown]) -> Diagnosis:
    """Say who failed first, and whom of the others that touched."""
    assert case.first is not None  # noqa: S101  (the caller has looked)
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
