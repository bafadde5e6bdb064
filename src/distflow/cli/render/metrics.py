"""Format metrics as a line, a table and a plot, and the training speed with the names of stragglers. Pure functions."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING

from distflow.cli.render.tables import table
from distflow.client.workflows import held_ranks
from distflow.documents.text import few, plain

if TYPE_CHECKING:
    from distflow.state.metrics import Latest, Scalar
    from distflow.state.record import GroupRecord


__all__ = [
    "NO_METRICS",
    "PACE",
    "PACE_OF_ALL",
    "GroupMetrics",
    "metric_lines",
    "metrics_table",
    "pace_words",
    "plot",
    "value_text",
]

GroupMetrics = Mapping[str, "Latest"]
"""The latest metrics of each group's lowest rank, by the name of the group."""

NO_METRICS: GroupMetrics = MappingProxyType({})

PACE_OF_ALL = ("slowest_step_s", "total_samples_per_s", "imbalance", "stragglers")
"""The metrics of all ranks together that the ``distflow.train.StepTimer`` of rank 0 prints. See ``pace_words``."""
PACE = ("step_s", "samples_per_s", "memory_bytes", *PACE_OF_ALL)
"""All metrics that a ``StepTimer`` prints. The first three are values of a single rank."""

_IN_ONE_LINE = 6
_STRAGGLERS = 8


def value_text(value: Scalar) -> str:
    """Return a value as a short text.

    >>> value_text(0.123456789), value_text(1234567), value_text("nan"), value_text(None)
    ('0.123457', '1234567', 'nan', '')
    """
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return f"{value:.6g}"
    return "" if value is None else plain(str(value))


def metric_lines(group: GroupRecord, latest: Latest) -> Iterator[str]:
    """Yield the lines of ``query`` for a group: ``step 120: loss 0.25, accuracy 0.97 (rank 0)``, and its speed if known."""
    shown = [f"{plain(name)} {value_text(value)}" for name, value in latest.values.items() if name not in PACE]
    if len(shown) > _IN_ONE_LINE:
        shown = [*shown[:_IN_ONE_LINE], "…"]
    who = f"rank {latest.rank}" if latest.rank is not None else latest.task
    words = f": {', '.join(shown)}" if shown else ""
    yield f"step {latest.step}{words} ({who})"
    pace = pace_words(group, latest.values)
    if pace:
        yield pace


def pace_words(group: GroupRecord, values: Mapping[str, Scalar]) -> str:
    """Return the measurements of a ``StepTimer``, with the task and node of each straggler, or an empty text."""
    words = []
    if isinstance(step_s := values.get("slowest_step_s"), int | float):
        words.append(f"{step_s:.3g} s per step")
    if isinstance(samples := values.get("total_samples_per_s"), int | float):
        words.append(f"{samples:.4g} samples/s")
    if isinstance(imbalance := values.get("imbalance"), int | float):
        words.append(f"the slowest rank takes {imbalance:.3g} × the mean")
    slow = [int(one) for one in str(values.get("stragglers") or "").split(",") if one.isdecimal() and len(one) < 10]
    if slow and words:
        words.append(f"slow: {few([_named(group, rank) for rank in slow], most=_STRAGGLERS, spare=0)}")
    return ", ".join(words)


def metrics_table(latest: Sequence[Latest], names: Collection[str], *, width: int | None) -> str:
    """Return a table of the latest values by task and rank, with a column for each of ``names``."""
    retried = any(one.attempt for one in latest)
    header = ("Task", *(("Retry ID",) if retried else ()), "Rank", "Step", *(plain(name) for name in names))
    rows = [
        (
            one.task,
            *((str(one.attempt),) if retried else ()),
            "" if one.rank is None else str(one.rank),
            str(one.step),
            *(value_text(one.values.get(name)) for name in names),
        )
        for one in latest
    ]
    return table(header, rows, width=width)


def _named(group: GroupRecord, rank: int) -> str:
    for task in group.tasks:
        if rank in held_ranks(task.ranks):
            return f"rank {rank} ({task.name} on {task.node})" if task.node else f"rank {rank} ({task.name})"
    return f"rank {rank}"


_MARKS = "*+ox#@"
_REST = "."
_GAP = "  "


def plot(title: str, series: Mapping[str, Sequence[tuple[int, float]]], *, width: int = 80, height: int = 12) -> str:
    """Return a plot of series of points (step, value), at most ``width`` columns wide. Each series has its own mark.

    If several points have the same position, the mark of the first series is shown. After the sixth series, all series share
    one mark.

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
    """Map a value between ``low`` and ``high`` to an index from 0 to ``places - 1``."""
    if high <= low:
        return 0
    # Halve the values first, because the difference of the largest floats is infinite.
    share = (value / 2 - low / 2) / (high / 2 - low / 2)
    return min(places - 1, max(0, round(share * (places - 1))))
