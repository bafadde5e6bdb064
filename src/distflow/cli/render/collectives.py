"""Format the current collective of each rank, and name the ranks that other ranks wait for. Pure functions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

from distflow.cli.render.tables import Paint
from distflow.documents.text import few, plain

if TYPE_CHECKING:
    from distflow.client.running_tasks import TaskStacks

__all__ = ["collective_lines"]

_NAMED = 8
"""The maximum number of ranks that are named with their tasks."""


@dataclass(frozen=True, slots=True, order=True, kw_only=True)
class _Position:
    """The position of a rank in the sequence of a process group's collectives. The smallest one is the furthest behind."""

    number: int
    waits: bool
    operation: str

    @property
    def words(self) -> str:
        if not self.number:
            return "before the first collective"
        return f"{'in' if self.waits else 'after'} {self.operation}, collective {self.number}"


@dataclass(frozen=True, slots=True, kw_only=True)
class _RankReport:
    """The report of one rank about a process group."""

    rank: int
    who: str
    position: _Position
    entered: int


def collective_lines(tasks: Sequence[TaskStacks], paint: Paint) -> Iterator[str]:
    """Yield the positions of all ranks and the missing ranks, for each process group in which a rank waits.

    Yield nothing if no rank has reported its collectives.
    """
    groups: dict[tuple[str, str, tuple[int, ...]], list[_RankReport]] = {}
    for task in tasks:
        for one in (task.seen or {}).get("collectives") or []:
            who = plain(f"rank {one['rank']} ({task.asked.task} on {task.asked.node.name})")
            for group in one["groups"]:
                key = (task.asked.group, group["name"], tuple(group["ranks"]))
                groups.setdefault(key, []).append(_parse_report(one["rank"], who, group))
    waiting = {key: reports for key, reports in groups.items() if any(one.position.waits for one in reports)}
    for (_, name, ranks), reports in waiting.items():
        yield paint.strong(plain(f"process group {name}, {_ranks(ranks)}"))
        yield from _positions(ranks, reports)
        yield from _verdict(reports)
        yield ""
    if groups and not waiting:
        yield from ("no rank waits in a collective", "")


def _parse_report(rank: int, who: str, group: Mapping[str, object]) -> _RankReport:
    number, entered = int(str(group["number"])), int(str(group["entered"]))
    position = _Position(number=number, waits=not group["is_over"], operation=plain(str(group["operation"])))
    return _RankReport(rank=rank, who=who, position=position, entered=entered)


def _positions(ranks: Sequence[int], reports: Sequence[_RankReport]) -> Iterator[str]:
    ordered = sorted(reports, key=lambda one: (one.position, one.rank), reverse=True)
    for position, equal in groupby(ordered, key=lambda one: one.position):
        yield f"    {position.words}: {_ranks([one.rank for one in equal])}"
    silent = set(ranks) - {one.rank for one in reports}
    if silent:
        yield f"    not known of: {_ranks(silent)}"


def _verdict(reports: Sequence[_RankReport]) -> Iterator[str]:
    """Yield the ranks that have not entered the earliest collective in which a rank waits.

    If there are none, yield the ranks that are in different operations at that position.
    """
    first = min(one.position.number for one in reports if one.position.waits)
    waiting = [one for one in reports if one.position.waits and one.position.number == first]
    missing = [one for one in reports if one.entered < first]
    operations = sorted({one.position.operation for one in waiting})
    if missing:
        yield f"  {_ranks([one.rank for one in waiting])} {_verb(waiting)} in {operations[0]} for {_few(missing)}"
    elif len(operations) > 1:
        at = (f"{name} on {_ranks([one.rank for one in waiting if one.position.operation == name])}" for name in operations)
        yield f"  collective {first} is not the same everywhere: {', '.join(at)}"


def _verb(some: Sequence[_RankReport]) -> str:
    return "waits" if len(some) == 1 else "wait"


def _few(some: Sequence[_RankReport]) -> str:
    return few([one.who for one in sorted(some, key=lambda one: one.rank)], most=_NAMED, spare=0)


def _ranks(ranks: Iterable[int]) -> str:
    """Return ``rank 3``, or ``ranks 0-2, 5``."""
    ordered = sorted(set(ranks))
    runs = [[rank for _, rank in run] for _, run in groupby(enumerate(ordered), key=lambda pair: pair[1] - pair[0])]
    words = ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
    return f"rank{'' if len(ordered) == 1 else 's'} {words}"
