"""Who is at which collective, in few words, and who has not come to the one that others wait in. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

from distflow.cli.render.tables import Paint
from distflow.documents.printable import plain
from distflow.documents.text import few

if TYPE_CHECKING:
    from distflow.client.running_tasks import TaskStacks

__all__ = ["collective_lines"]

_NAMED = 8
"""Ranks that are named with their tasks."""


@dataclass(frozen=True, slots=True, order=True, kw_only=True)
class _Place:
    """Where a rank is in a process group; the first in order is the furthest behind."""

    number: int
    waits: bool
    operation: str

    @property
    def words(self) -> str:
        if not self.number:
            return "before the first collective"
        return f"{'in' if self.waits else 'after'} {self.operation}, collective {self.number}"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Told:
    """What one rank said of a process group."""

    rank: int
    who: str
    place: _Place
    entered: int


def collective_lines(tasks: Sequence[TaskStacks], paint: Paint) -> Iterator[str]:
    """Yield, of each process group in which a rank waits, where its ranks are, and who is missing; nothing where none told."""
    groups: dict[tuple[str, str, tuple[int, ...]], list[_Told]] = {}
    for task in tasks:
        for one in (task.seen or {}).get("collectives") or []:
            who = plain(f"rank {one['rank']} ({task.asked.task} on {task.asked.node.name})")
            for group in one["groups"]:
                key = (task.asked.group, group["name"], tuple(group["ranks"]))
                groups.setdefault(key, []).append(_told(one["rank"], who, group))
    waiting = {key: told for key, told in groups.items() if any(one.place.waits for one in told)}
    for (_, name, ranks), told in waiting.items():
        yield paint.strong(plain(f"process group {name}, {_ranks(ranks)}"))
        yield from _places(ranks, told)
        yield from _verdict(told)
        yield ""
    if groups and not waiting:
        yield from ("no rank waits in a collective", "")


def _told(rank: int, who: str, group: Mapping[str, object]) -> _Told:
    number, entered = int(str(group["number"])), int(str(group["entered"]))
    place = _Place(number=number, waits=not group["is_over"], operation=plain(str(group["operation"])))
    return _Told(rank=rank, who=who, place=place, entered=entered)


def _places(ranks: Sequence[int], told: Sequence[_Told]) -> Iterator[str]:
    ordered = sorted(told, key=lambda one: (one.place, one.rank), reverse=True)
    for place, there in groupby(ordered, key=lambda one: one.place):
        yield f"    {place.words}: {_ranks([one.rank for one in there])}"
    silent = set(ranks) - {one.rank for one in told}
    if silent:
        yield f"    not known of: {_ranks(silent)}"


def _verdict(told: Sequence[_Told]) -> Iterator[str]:
    """Name who has not begun the earliest collective that somebody waits in; else, ranks that are in different ones there."""
    first = min(one.place.number for one in told if one.place.waits)
    there = [one for one in told if one.place.waits and one.place.number == first]
    missing = [one for one in told if one.entered < first]
    operations = sorted({one.place.operation for one in there})
    if missing:
        yield f"  {_ranks([one.rank for one in there])} {_verb(there)} in {operations[0]} for {_few(missing)}"
    elif len(operations) > 1:
        at = (f"{name} on {_ranks([one.rank for one in there if one.place.operation == name])}" for name in operations)
        yield f"  collective {first} is not the same everywhere: {', '.join(at)}"


def _verb(some: Sequence[_Told]) -> str:
    return "waits" if len(some) == 1 else "wait"


def _few(some: Sequence[_Told]) -> str:
    return few([one.who for one in sorted(some, key=lambda one: one.rank)], most=_NAMED, spare=0)


def _ranks(ranks: Iterable[int]) -> str:
    """Return ``rank 3``, or ``ranks 0-2, 5``."""
    ordered = sorted(set(ranks))
    runs = [[rank for _, rank in run] for _, run in groupby(enumerate(ordered), key=lambda pair: pair[1] - pair[0])]
    words = ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
    return f"rank{'' if len(ordered) == 1 else 's'} {words}"
