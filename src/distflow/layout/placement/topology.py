"""Tasks that request to be near each other: OSMO's ``topology``, matched with the labels of the nodes. Pure.

Tasks of one gang with the same ``key`` and ``group`` go to nodes with the same value of the label ``key``, for example to one
rack. If no placement satisfies all requests, the preferred ones are dropped one by one, the last written first. Required ones
are never dropped.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice, product

from distflow.layout.placement.node_placement import Demand, Free, Placement, Unplaced, place

__all__ = ["place_near"]

_TRIES = 2_000
"""Choices of units that are tried before a gang is refused."""

_Wish = tuple[str, str]
"""Key and group."""


def place_near(demands: Sequence[Demand], nodes: Sequence[Free], *, shared: bool) -> Placement | tuple[Unplaced, ...]:
    """Place tasks like ``node_placement.place``, and satisfy their topology requests.

    A pool of one node is one unit, regardless of its labels.
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
    """Return every topology request of a gang and whether it is required, in the order of the spec."""
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
    """Yield every assignment of a unit to each request."""
    values = [list(dict.fromkeys(node.labels[key] for node in nodes if key in node.labels)) for key, _ in wishes]
    for chosen in product(*values):
        yield dict(zip(wishes, chosen, strict=True))


def _labels(demand: Demand, units: Mapping[_Wish, str]) -> dict[str, str]:
    return {near.key: units[near.key, near.group] for near in demand.near if (near.key, near.group) in units}
