"""Format the total and used resources of nodes as text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import Enum

__all__ = ["WHAT_USED_MEANS", "Mode", "amount_cells", "total_of"]

WHAT_USED_MEANS = "used is what this user's unfinished workflows hold, as distflow's own record has it; no node was asked"


class Mode(str, Enum):
    """The amounts to show: used and total, or free."""

    USED = "used"
    FREE = "free"


def total_of(values: Sequence[int | None]) -> int | None:
    """Return the sum, or ``None`` if a value is unknown (``None``)."""
    known = [value for value in values if value is not None]
    return sum(known) if len(known) == len(values) else None


def amount_cells(amounts: Sequence[tuple[int, int | None]], mode: Mode) -> tuple[str, ...]:
    """Return one cell for CPUs, memory (GiB) and GPUs each. Used amounts are rounded up, and totals are rounded down."""
    found = []
    for (used, total), unit in zip(amounts, (1, 2**30, 1), strict=True):
        if mode is Mode.FREE:
            found.append("-" if total is None else str(max(0, total - used) // unit))
        else:
            found.append(f"{math.ceil(used / unit)}/{'-' if total is None else total // unit}")
    return tuple(found)
