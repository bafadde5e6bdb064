"""Check that intervals of ranks cover 0 … world_size-1 exactly once, or find each single number whose change achieves that.

One wrong number can cause a gap, an overlap and a wrong sum. A number is found if changing it alone corrects all of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise

from msgspec import Struct

from distflow.structs import replace

__all__ = ["Edit", "RankSegment", "Row", "filled", "fits", "gaps_of", "overlaps_of", "segments", "single_edits", "tiles"]


class Row(Struct, frozen=True, kw_only=True):
    """The ranks that one task claims."""

    offset: int | None
    """First rank; ``None`` if it follows the task before it."""
    size: int
    world_size: int | None
    """``None`` if the task does not state it."""
    max_size: int | None = None
    """The largest size that its GPUs allow; ``None`` for any size."""
    editable: frozenset[str] = frozenset({"offset", "size", "world_size"})
    """The fields whose numbers are in the spec, where the user can change them."""


class Edit(Struct, frozen=True):
    """A change of the field ``key`` of the row at ``index`` to ``value``."""

    index: int
    key: str
    value: int


class RankSegment(Struct, frozen=True):
    """The ranks from ``start`` up to but not including ``stop``, and the rows that claim them."""

    start: int
    stop: int
    rows: tuple[int, ...]


def filled(rows: Sequence[Row]) -> list[tuple[int, int]]:
    """Return ``(offset, end)`` of each row, with missing offsets computed in the order of the rows."""
    intervals, cursor = [], 0
    for row in rows:
        offset = cursor if row.offset is None else row.offset
        cursor = offset + row.size
        intervals.append((offset, cursor))
    return intervals


def tiles(rows: Sequence[Row]) -> bool:
    """Return whether the rows follow each other from rank 0 without gap or overlap."""
    cursor = 0
    for start, stop in sorted(filled(rows)):
        if start != cursor:
            return False
        cursor = stop
    return True


def fits(rows: Sequence[Row]) -> bool:
    """Return whether the rows tile, and every stated world size is the sum of their sizes."""
    total = sum(row.size for row in rows)
    return all(row.world_size in (None, total) for row in rows) and tiles(rows)


def segments(rows: Sequence[Row], world_size: int | None = None) -> list[RankSegment]:
    """Divide the claimed ranks and those below ``world_size`` into segments, each claimed by the same rows or by none."""
    intervals = filled(rows)
    edges = sorted({0, world_size or 0, *(edge for interval in intervals for edge in interval)})
    opening: dict[int, list[int]] = {}
    closing: dict[int, list[int]] = {}
    for index, (start, stop) in enumerate(intervals):
        opening.setdefault(start, []).append(index)
        closing.setdefault(stop, []).append(index)
    parts: list[RankSegment] = []
    holders: set[int] = set()
    for start, stop in pairwise(edges):
        holders |= set(opening.get(start, ()))
        holders -= set(closing.get(start, ()))
        rows_here = tuple(sorted(holders))
        if parts and parts[-1].rows == rows_here:
            parts[-1] = RankSegment(parts[-1].start, stop, rows_here)
        else:
            parts.append(RankSegment(start, stop, rows_here))
    return parts


def gaps_of(parts: Sequence[RankSegment]) -> list[RankSegment]:
    """Return the parts that no row claims. Parts below rank 0 are left out."""
    return [part for part in parts if not part.rows and part.start >= 0]


def overlaps_of(parts: Sequence[RankSegment]) -> list[RankSegment]:
    """Return the parts that more than one row claims."""
    return [part for part in parts if len(part.rows) > 1]


def single_edits(rows: Sequence[Row]) -> list[Edit]:
    """Return each change of one number that makes the rows fit.

    Changes of world sizes come first, then offsets, then sizes. Within each kind, later rows come first.
    """
    order = sorted(_suspects(rows), reverse=True)
    edits: list[Edit] = []
    for key, values in (("world_size", _world_sizes), ("offset", _offsets), ("size", _sizes)):
        for index in order:
            if key in rows[index].editable and _others_agree(rows, index, key):
                edits += [
                    Edit(index, key, value)
                    for value in dict.fromkeys(values(rows, index))
                    if _allowed(rows[index], key, value) and fits(_edited(rows, index, key, value))
                ]
    return edits


def _suspects(rows: Sequence[Row]) -> set[int]:
    """Return the indexes of the rows that may contain the wrong number, such as those next to a gap.

    Skipping the other rows keeps the search fast in worlds of thousands of tasks. With computed offsets every row is a suspect,
    because its size moves the rows after it.
    """
    if any(row.offset is None for row in rows):
        return set(range(len(rows)))
    stated = Counter(row.world_size for row in rows)
    usual = stated.most_common(1)[0][0]
    parts = segments(rows, usual)
    gaps = gaps_of(parts)
    edges = {edge for gap in gaps for edge in (gap.start, gap.stop)}
    found = {index for part in overlaps_of(parts) for index in part.rows}
    last = max(stop for _, stop in filled(rows))
    for index, (start, stop) in enumerate(filled(rows)):
        odd = rows[index].world_size != usual or stated[usual] * 2 <= len(rows)
        if odd or start in edges or stop in edges or stop == last or start < 0 or start == stop:
            found.add(index)
    return found


def _edited(rows: Sequence[Row], index: int, key: str, value: int) -> list[Row]:
    changed = list(rows)
    row = rows[index]
    if key == "offset":
        changed[index] = replace(row, offset=value)
    elif key == "size":
        changed[index] = replace(row, size=value)
    else:
        changed[index] = replace(row, world_size=value)
    return changed


def _allowed(row: Row, key: str, value: int) -> bool:
    old = {"offset": row.offset, "size": row.size, "world_size": row.world_size}[key]
    if value == old:
        return False
    return key != "size" or (value >= 1 and (row.max_size is None or value <= row.max_size))


def _others_agree(rows: Sequence[Row], index: int, key: str) -> bool:
    """Return whether all world sizes that this edit does not change are equal. If not, the edit cannot make the rows fit."""
    stated = {row.world_size for at, row in enumerate(rows) if not (key == "world_size" and at == index)}
    return len(stated - {None}) <= 1


def _world_sizes(rows: Sequence[Row], index: int) -> Iterator[int]:
    if rows[index].world_size is not None:
        yield sum(row.size for row in rows)


def _offsets(rows: Sequence[Row], index: int) -> Iterator[int]:
    """Yield the possible offsets of a row: the start of each gap between the other rows, and the end of the last of them."""
    if rows[index].offset is None:
        return
    cursor = 0
    for start, stop in sorted(interval for at, interval in enumerate(filled(rows)) if at != index):
        if start > cursor:
            yield cursor
        cursor = max(cursor, stop)
    yield cursor


def _sizes(rows: Sequence[Row], index: int) -> Iterator[int]:
    """Yield the possible sizes of the row at ``index``.

    These are the distance to the start of the next row, and each stated world size minus the sizes of the other rows.
    """
    intervals = filled(rows)
    begin = intervals[index][0]
    yield from (start - begin for start in sorted({start for start, _ in intervals if start > begin})[:1])
    stated = {row.world_size for row in rows} - {None}
    for world_size in stated:
        if world_size is not None:
            yield world_size - sum(row.size for at, row in enumerate(rows) if at != index)
