"""Tasks that want to stand near each other: OSMO's ``topology``, held against the labels of the nodes. Pure.

Tasks of one gang with the same ``key`` and ``group`` stand on nodes that have the same value of the label ``key``: in one rack,
say. A placement is looked for with every wish, then without the preferred ones, from the last written to the first; what is
required is never given up.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice, product

from distflow.layout.placement.node_placement import Demand, Free, Placement, Unplaced, place

__all__ = ["place_near"]

_TRIES = 2_000
"""Ways to choose units that are tried before a gang is refused."""

_Wish = tuple[str, str]
"""Key and group."""


def place_near(demands: Sequence[Demand], nodes: Sequence[Free], *, shared: bool) -> Placement | tuple[Unplaced, ...]:
    """Return what ``placement.place`` does, for gangs with topology too.

    A pool of one node is one unit, whatever its labels are.
    """
    wishes = _wishes(demands)
    if not wishes or len(nodes) == 1:
        return place(demands, nodes, shared=shared)
    kept = list(wishes)
    while True:
        found = _place_in_units(demands, nodes, kept, shared=shared)
        preferred = [wish for wish in kept if not wishes[wish]]
        if isinstance(found, Placement) or not preferred:
            return found
        kept.remove(preferred[-1])


def _wishes(demands: Sequence[Demand]) -> dict[_Wish, bool]:
    """Return every wish of a gang and whether it is required, in the order in which they are written."""
    wishes: dict[_Wish, bool] = {}
    for demand in demands:
        for near in demand.near:
            wishes[near.key, near.group] = wishes.get((near.key, near.group), False) or near.required
    return wishes


def _place_in_units(
    demands: Sequence[Demand], nodes: Sequence[Free], wishes: Sequence[_Wish], *, shared: bool
) -> Placement | tuple[Unplaced, ...]:
    missing = [key for key, _ in wishes if not any(key in node.labels for node in nodes)]
    if missing:
        first = next(demand for demand in demands if any(near.key == missing[0] for near in demand.near))
        return (Unplaced(task=first.task, reasons=(f"no node has the label `{missing[0]}`, which its topology asks for",)),)
    best: tuple[Unplaced, ...] | None = None
    for units in islice(_choices(nodes, wishes), _TRIES):
        asked = [replace(demand, labels={**demand.labels, **_labels(demand, units)}) for demand in demands]
        found = place(asked, nodes, shared=shared)
        if isinstance(found, Placement):
            return found
        if best is None or len(found) < len(best):
            best = found
    if best is None:
        raise AssertionError("every key has a value")
    return best


def _choices(nodes: Sequence[Free], wishes: Sequence[_Wish]) -> Iterator[Mapping[_Wish, str]]:
    """Yield every way to give each wish a unit."""
    values = [list(dict.fromkeys(node.labels[key] for node in nodes if key in node.labels)) for key, _ in wishes]
    for chosen in product(*values):
        yield dict(zip(wishes, chosen, strict=True))


def _labels(demand: Demand, units: Mapping[_Wish, str]) -> dict[str, str]:
    return {near.key: units[near.key, near.group] for near in demand.near if (near.key, near.group) in units}
