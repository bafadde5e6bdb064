"""What nodes have and what is in use of it, as text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import Enum

__all__ = ["WHAT_USED_MEANS", "Mode", "amount_cells", "total_of"]

WHAT_USED_MEANS = "used is what this user's unfinished workflows hold, as distflow's own record has it; no node was asked"


class Mode(str, Enum):
    """Which amounts are shown."""

    USED = "used"
    FREE = "free"


def total_of(values: Sequence[int | None]) -> int | None:
    """Return the sum, which is not known when a part of it is not."""
    known = [value for value in values if value is not None]
    return sum(known) if len(known) == len(values) else None


def amount_cells(amounts: Sequence[tuple[int, int | None]], mode: Mode) -> tuple[str, ...]:
    """Return the amounts as text: what is used rounded up, what there is rounded down."""
    found = []
    for (used, total), unit in zip(amounts, (1, 2**30, 1), strict=True):
        if mode is Mode.FREE:
            found.append("-" if total is None else str(max(0, total - used) // unit))
        else:
            found.append(f"{math.ceil(used / unit)}/{'-' if total is None else total // unit}")
    return tuple(found)
