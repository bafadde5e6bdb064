"""A rank layout as text in plain ASCII, for any log: usually one line for each task, and one mark for each rank.

::

    ranks     0       8       16      24
    master    ########                    0-7    of 24  spec.yaml:12
    worker            !!!!!!!!            8-15   of 24  spec.yaml:30
    worker-2          !!!!!!!!            8-15   of 24  spec.yaml:44  <--
    (none)                    ........    16-23
    ! claimed more than once   . claimed by no task

``#`` is a rank held once, ``!`` a rank that more than one task claims, ``>`` a rank beyond the world size, ``.`` a rank that
no task claims. In worlds of at most 16 ranks a mark is repeated. Worlds of more than 64 ranks are scaled down, and the first
line states the scale. Of more than 24 tasks only some are drawn.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from msgspec import Struct

from distflow.layout.ranks import WorldLayout

__all__ = ["Bar", "draw", "draw_world", "rank_text"]

_WIDTH = 64
_MANY = 24
_LEGEND = {"!": "claimed more than once", ".": "claimed by no task", ">": "beyond the world size"}


class Bar(Struct, frozen=True, kw_only=True):
    """The ranks that one task claims."""

    name: str
    offset: int
    """First global rank; ranks below 0 are not drawn."""
    size: int
    note: str = ""
    """A note after its ranks, such as the claimed world size."""
    place: str = ""
    """``file:line`` of the claim."""
    marked: bool = False
    """Whether the line of the spec at ``place`` has to change."""

    @property
    def end(self) -> int:
        """The rank after its last rank."""
        return self.offset + self.size


def rank_text(start: int, stop: int) -> str:
    """Return ``8-15`` for the ranks 8 up to but not including 16, and ``8`` for a single rank."""
    return str(start) if stop - start == 1 else f"{start}-{stop - 1}"


def draw_world(world: WorldLayout) -> str:
    """Return the picture of a correct layout."""
    kept = len(world.smaller[-1].tasks) if world.smaller else len(world.tasks)
    bars = [
        Bar(name=item.task, offset=item.offset, size=item.size, note="may be left out" if item.node_rank >= kept else "")
        for item in world.tasks
    ]
    return draw(bars, world.world_size)


def draw(bars: Sequence[Bar], world_size: int | None = None) -> str:
    """Return the picture of all claims; ``world_size`` is ``None`` if it is not known."""
    span = max([bar.end for bar in bars] + [world_size or 1, 1])
    scale = _Scale(span)
    counts = _segments(bars, span)
    twice = [(start, stop) for start, stop, count in counts if count > 1]
    gaps = [(start, stop) for start, stop, count in counts if count == 0]
    beyond = [(world_size, span)] if world_size is not None and span > world_size else []
    shown = _shown(bars, twice)
    width = max(len(name) for name in ["ranks", "(none)" if gaps else "", *(bar.name for bar in shown if bar)]) + 2
    ticks = {bar.offset for bar in shown if bar} | {start for start, _ in gaps} | {world_size or span, span}
    rows = [("ranks".ljust(width) + scale.ruler(sorted(ticks)), "", "", "")]
    for bar in shown:
        if bar is None:
            rows.append(("...", "", "", ""))
            continue
        cells = scale.cells([("#", [(bar.offset, bar.end)])])
        cells = scale.cells([(">", _within(bar, beyond)), ("!", _within(bar, twice))], cells)
        place = bar.place + ("  <--" if bar.marked else "")
        rows.append((bar.name.ljust(width) + cells, rank_text(bar.offset, bar.end), bar.note, place))
    if gaps:
        ranks = ", ".join(rank_text(*gap) for gap in gaps[:4]) + (", ..." if len(gaps) > 4 else "")
        rows.append(("(none)".ljust(width) + scale.cells([(".", gaps)]), ranks, "", ""))
    lines = _aligned(rows)
    if scale.per_mark > 1:
        lines[0] += f"   one mark = {scale.per_mark} ranks"
    used = {"!": twice, ".": gaps, ">": beyond}
    legend = "   ".join(f"{mark} {meaning}" for mark, meaning in _LEGEND.items() if used[mark])
    return "\n".join(line.rstrip() for line in [*lines, *([legend] if legend else [])])


def _aligned(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True) if w).rstrip() for row in rows]


def _within(bar: Bar, parts: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    cut = ((max(start, bar.offset), min(stop, bar.end)) for start, stop in parts)
    return [(start, stop) for start, stop in cut if start < stop]


def _segments(bars: Sequence[Bar], span: int) -> list[tuple[int, int, int]]:
    """Return the parts of 0 … span, each with the number of tasks that claim it."""
    steps: dict[int, int] = {0: 0, span: 0}
    for bar in bars:
        steps[max(bar.offset, 0)] = steps.get(max(bar.offset, 0), 0) + 1
        steps[max(bar.end, 0)] = steps.get(max(bar.end, 0), 0) - 1
    parts: list[tuple[int, int, int]] = []
    count, before = 0, 0
    for at in sorted(steps):
        if at > before:
            parts.append((before, at, count))
        count, before = count + steps[at], at
    return parts


def _shown(bars: Sequence[Bar], twice: Sequence[tuple[int, int]]) -> list[Bar | None]:
    """Return the lines to draw; ``None`` stands for lines that are left out.

    Of more than 24 lines, it returns the first two, the last, and the first eight that are marked or overlap, with neighbors.
    """
    if len(bars) <= _MANY:
        return list(bars)
    wanted = {0, 1, len(bars) - 1}
    interesting = [index for index, bar in enumerate(bars) if bar.marked or _within(bar, twice)]
    for index in interesting[: _MANY // 3]:
        wanted |= {index - 1, index, index + 1}
    shown: list[Bar | None] = []
    for index, bar in enumerate(bars):
        if index in wanted:
            shown.append(bar)
        elif shown[-1] is not None:
            shown.append(None)
    return shown


class _Scale(Struct, frozen=True):
    """Converts ranks to columns."""

    span: int

    @property
    def per_mark(self) -> int:
        """The number of ranks for each mark, a power of two."""
        step = 1
        while self.span > step * _WIDTH:
            step *= 2
        return step

    @property
    def columns(self) -> int:
        """The number of columns for each mark: more than one in small worlds."""
        return 4 if self.span <= 8 else 2 if self.span <= 16 else 1

    def column(self, rank: int) -> int:
        """Return the first column of a rank."""
        return rank // self.per_mark * self.columns

    def cells(self, marks: Iterable[tuple[str, Sequence[tuple[int, int]]]], below: str = "") -> str:
        """Return the line ``below`` with each mark drawn over its intervals of ranks; later marks overwrite earlier ones."""
        line = list(below.ljust(self.column(self.span - 1) + self.columns))
        for mark, parts in marks:
            for start, stop in parts:
                first, last = self.column(max(start, 0)), self.column(stop - 1) + self.columns
                line[first:last] = mark * max(0, last - first)
        return "".join(line)

    def ruler(self, ticks: Iterable[int]) -> str:
        """Return a line with the ranks ``ticks`` at their columns, without those that would overlap."""
        line = ""
        for tick in ticks:
            column = self.column(tick) if tick < self.span else self.column(self.span - 1) + self.columns
            if tick >= 0 and (not line or column > len(line)):
                line = line.ljust(column) + str(tick)
        return line
