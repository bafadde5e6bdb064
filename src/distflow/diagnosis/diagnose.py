"""Which rules a case fulfils, and which of them tells the cause. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from distflow.diagnosis.ends import by_kernel, by_other_ends
from distflow.diagnosis.model import Case, Diagnosis, Hit, Level, hits_in
from distflow.diagnosis.rules import PEER_DIED, RULES, Rule

__all__ = ["diagnose"]

_LONGEST_LINE = 500


@dataclass(frozen=True, slots=True)
class _Shown:
    """A rule that is fulfilled, and by which lines."""

    rule: Rule
    hits: tuple[Hit, ...]
    words: str

    def is_of(self, task: str) -> bool:
        """Whether that task printed one of the lines."""
        return any(hit.witness.task == task for hit in self.hits)


def diagnose(case: Case) -> tuple[Diagnosis, ...]:
    """Return what a case shows, the most specific first; nothing when no rule knows it.

    What names a cause is believed before what tells of waiting, and that before what tells of a lost peer; and the first
    task to fail before all others. Where its own words are of none of these, the others only lost it.
    """
    killed = by_kernel(case)
    if killed is not None:
        return (killed,)
    shown = _shown(case)
    ended = by_other_ends(case)
    first = case.first.task if case.first else None
    if first is not None and shown and not any(one.is_of(first) for one in shown):
        return (*ended, _peer_died(case, shown))
    for level in Level:
        said = [one for one in shown if one.rule.level is level]
        chosen = [one for one in said if first is not None and one.is_of(first)] or said
        if level is Level.CAUSE and chosen:
            return tuple(_diagnosis(case, one) for one in chosen)
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


def _peer_died(case: Case, shown: list[_Shown]) -> Diagnosis:
    """Say who failed first, and whom of the others that touched."""
    assert case.first is not None  # noqa: S101  (the caller has looked)
    task, rank = case.first.task, case.first.rank
    place = next((one.place for one in case.witnesses if one.task == task), task)
    who = f"rank {rank} ({place})" if rank.isdigit() else place
    others = dict.fromkeys(hit.who for one in shown if one.rule.level is not Level.CAUSE for hit in one.hits)
    lost = f"; {', '.join(others)} lost it" if others else ""
    last = next((line for one in case.witnesses if one.task == task for line in reversed(one.lines) if line.strip()), "")
    return Diagnosis(
        key=PEER_DIED.key,
        cause=PEER_DIED.cause,
        found=f"{who} failed first: {case.first.message}{lost}",
        remedy=PEER_DIED.remedy,
        task=task,
        line=_cut(last),
    )


def _cut(line: str) -> str:
    line = line.strip()
    return line if len(line) <= _LONGEST_LINE else f"{line[:_LONGEST_LINE]} …"
