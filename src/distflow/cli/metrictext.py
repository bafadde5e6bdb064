"""Metrics as people see them: one line, the pace with stragglers by name, and a table. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING

from distflow.cli.tables import table
from distflow.client.workflows import held_ranks
from distflow.documents.printable import plain
from distflow.documents.text import few

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
    "value_text",
]

GroupMetrics = Mapping[str, "Latest"]
"""What the first rank of each group said last, by the group's name."""

NO_METRICS: GroupMetrics = MappingProxyType({})

PACE_OF_ALL = ("slowest_step_s", "total_samples_per_s", "imbalance", "stragglers")
"""The names under which rank 0's ``distflow.train.StepTimer`` tells of all ranks together: ``pace_words`` says them."""
PACE = ("step_s", "samples_per_s", "memory_bytes", *PACE_OF_ALL)
"""All names that a ``StepTimer`` prints; the first ones are each rank's own."""

_IN_ONE_LINE = 6
_STRAGGLERS = 8


def value_text(value: Scalar) -> str:
    """Return a value in few characters.

    >>> value_text(0.123456789), value_text(1234567), value_text("nan"), value_text(None)
    ('0.123457', '1234567', 'nan', '')
    """
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return f"{value:.6g}"
    return "" if value is None else plain(str(value))


def metric_lines(group: GroupRecord, latest: Latest) -> Iterator[str]:
    """Yield what ``query`` shows of a group: ``step 120: loss 0.25, accuracy 0.97 (rank 0)``, and its pace if known."""
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
    """Return what a ``StepTimer`` measured, stragglers with their task and node; empty when nothing was."""
    words = []
    if isinstance(step_s := values.get("slowest_step_s"), int | float):
        words.append(f"{step_s:.3g} s a step")
    if isinstance(samples := values.get("total_samples_per_s"), int | float):
        words.append(f"{samples:.4g} samples/s")
    if isinstance(imbalance := values.get("imbalance"), int | float):
        words.append(f"the slowest rank takes {imbalance:.3g} × the mean")
    slow = [int(one) for one in str(values.get("stragglers") or "").split(",") if one.isdecimal() and len(one) < 10]
    if slow and words:
        words.append(f"slow: {few([_named(group, rank) for rank in slow], most=_STRAGGLERS, spare=0)}")
    return ", ".join(words)


def metrics_table(latest: Sequence[Latest], names: Collection[str], *, width: int | None) -> str:
    """Return the latest values by task and rank, a column for each of ``names``."""
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
