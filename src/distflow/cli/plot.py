"""Small plots of numbers by step, for a terminal. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

__all__ = ["plot"]

_MARKS = "*+ox#@"
_REST = "."
_GAP = "  "


def plot(title: str, series: Mapping[str, Sequence[tuple[int, float]]], *, width: int = 80, height: int = 12) -> str:
    """Return a plot of points (step, value), at most ``width`` columns wide; each series has a mark of its own.

    Several points in one place show as the first series' mark. After six series the others share one mark.

    >>> print(plot("loss", {"rank 0": [(0, 4.0), (10, 2.0), (20, 1.0)]}, width=26, height=4), end="")
    loss
    4  |*
       |
       |          *
    1  |                    *
       +---------------------
        0                  20
    """
    points = [point for found in series.values() for point in found]
    if not points:
        return f"{title}\n"
    first, last = min(step for step, _ in points), max(step for step, _ in points)
    low, high = min(value for _, value in points), max(value for _, value in points)
    edge = max(len(f"{low:.4g}"), len(f"{high:.4g}"))
    columns = max(10, width - edge - len(_GAP) - 2)
    rows = [[" "] * columns for _ in range(height)]
    for number, found in enumerate(series.values()):
        mark = _MARKS[number] if number < len(_MARKS) else _REST
        for step, value in found:
            column = _place(step, first, last, columns)
            row = height - 1 - _place(value, low, high, height)
            if rows[row][column] == " ":
                rows[row][column] = mark
    labels = {0: f"{high:.4g}", height - 1: f"{low:.4g}"} if high > low else {height - 1: f"{low:.4g}"}
    lines = [title]
    lines += [f"{labels.get(number, ''):>{edge}}{_GAP}|{''.join(row)}".rstrip() for number, row in enumerate(rows)]
    lines.append(f"{' ' * edge}{_GAP}+{'-' * columns}")
    begin, end = str(first), str(last) if last > first else ""
    lines.append(f"{' ' * edge}{_GAP} {begin}{end:>{max(0, columns - len(begin))}}".rstrip())
    if len(series) > 1:
        names = [f"{mark} {name}" for mark, name in zip(_MARKS, series, strict=False)]
        more = len(series) - len(_MARKS)
        lines.append(f"{' ' * edge}{_GAP} {', '.join([*names, *([f'{_REST} {more} more'] if more > 0 else [])])}")
    return "".join(f"{line}\n" for line in lines)


def _place(value: float, low: float, high: float, places: int) -> int:
    """Return which of ``places`` between low and high a value is at."""
    if high <= low:
        return 0
    # Halved, so that the difference of the largest floats is finite.
    share = (value / 2 - low / 2) / (high / 2 - low / 2)
    return min(places - 1, max(0, round(share * (places - 1))))
