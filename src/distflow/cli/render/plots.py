"""Plots for terminals, drawn by plotext: braille dots, axes and a legend."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from distflow.documents.text import few, plain

__all__ = ["plot"]

Points = Sequence[tuple[float, float]]

_MARKS = "*+ox#@"
"""The marks of several series without colors, because their braille dots would look the same."""
_COLORS = (6, 3, 2, 5, 4, 1)
"""The ANSI color numbers of the series, in order."""
_MOST_NAMES = 12
"""The maximum number of series in the legend."""
_MAX_VALUE = 1e100
"""Larger absolute values are plotted as this value, because plotext fails for values near 1e307."""
_TICKS = 5


def plot(
    title: str,
    series: Mapping[str, Points],
    *,
    axis: str = "",
    width: int = 80,
    height: int = 16,
    is_log: bool = False,
    has_colors: bool = False,
) -> str:
    """Return a plot, which ends with a line break.

    Args:
        title: The name of the metric.
        series: The points (x, y) of each series, by its name. The points of a series are in the order of x.
        axis: The name of the horizontal axis, such as ``step``.
        width: The width of the terminal in columns.
        height: The number of lines, without the legend.
        is_log: Whether the vertical axis is logarithmic. Values that are not positive are then left out.
        has_colors: Whether each series has a color. Without colors, series have different marks, which repeat after the sixth.

    """
    shown = {name: _drawable(points, is_log) for name, points in series.items()}
    shown = {name: points for name, points in shown.items() if points}
    if not shown:
        return f"{plain(title)}: no numbers to plot{' on a logarithmic axis' if is_log else ''}\n"
    import plotext

    plotext.clear_figure()
    plotext.theme("clear")
    plotext.limit_size(False, False)
    plotext.plotsize(max(20, width), max(6, height))
    plotext.title(plain(title))
    if axis:
        plotext.xlabel(plain(axis))
    if is_log:
        plotext.yscale("log")
    for number, points in enumerate(shown.values()):
        uses_braille = len(shown) == 1 or has_colors
        plotext.plot(
            [x for x, _ in points],
            [y for _, y in points],
            marker="braille" if uses_braille else _MARKS[number % len(_MARKS)],
            color=_COLORS[number % len(_COLORS)] if has_colors else None,
        )
    first, last = min(points[0][0] for points in shown.values()), max(points[-1][0] for points in shown.values())
    ticks = sorted({round(first + (last - first) * number / (_TICKS - 1)) for number in range(_TICKS)})
    plotext.xticks(ticks, [str(tick) for tick in ticks])
    values = [y for points in shown.values() for _, y in points]
    marks = _between(min(values), max(values), is_log)
    plotext.yticks(marks, [f"{value:.4g}" for value in marks])
    text = plotext.build()
    lines = [(line if has_colors else line.replace("\x1b[0m", "")).rstrip() for line in text.rstrip("\n").split("\n")]
    if len(shown) > 1:
        lines.append(_legend([*shown], has_colors))
    return "".join(f"{line}\n" for line in lines)


def _between(low: float, high: float, is_log: bool) -> list[float]:
    """Return values from ``low`` to ``high`` at equal distances on the axis."""
    if low == high:
        return [low]
    shares = [number / (_TICKS - 1) for number in range(_TICKS)]
    return [low ** (1 - share) * high**share if is_log else low + (high - low) * share for share in shares]


def _legend(names: Sequence[str], has_colors: bool) -> str:
    marked = [
        f"\x1b[38;5;{_COLORS[number % len(_COLORS)]}m⣿\x1b[0m {plain(name)}"
        if has_colors
        else f"{_MARKS[number % len(_MARKS)]} {plain(name)}"
        for number, name in enumerate(names[:_MOST_NAMES])
    ]
    return few([*marked, *names[_MOST_NAMES:]], ", ", most=_MOST_NAMES, spare=0)


def _drawable(points: Points, is_log: bool) -> list[tuple[float, float]]:
    known = [(x, min(_MAX_VALUE, max(-_MAX_VALUE, y))) for x, y in points if math.isfinite(x) and math.isfinite(y)]
    return [(x, y) for x, y in known if y > 0 or not is_log]
