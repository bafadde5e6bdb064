"""Format metrics, the use of resources, and the training speed with its stragglers. The functions are pure."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING

from distflow.cli.render.tables import table
from distflow.client.workflows import held_ranks
from distflow.documents.quantities import bytes_text, duration_hms
from distflow.documents.text import few, plain

if TYPE_CHECKING:
    from distflow.state.metrics import Latest, Scalar
    from distflow.state.record import GroupRecord
    from distflow.state.samples import ResourceSamples, Usage


__all__ = [
    "NO_BAR",
    "NO_METRICS",
    "NO_USAGE",
    "PACE",
    "PACE_OF_ALL",
    "GroupMetrics",
    "TaskUsage",
    "metric_lines",
    "metrics_table",
    "natural_key",
    "pace_words",
    "progress_of",
    "sample_text",
    "samples_table",
    "spark",
    "usage_cells",
    "usage_header",
    "value_text",
]

GroupMetrics = Mapping[str, "Latest"]
"""The latest metrics of each group's lowest rank, by the name of the group."""

NO_METRICS: GroupMetrics = MappingProxyType({})

TaskUsage = Mapping[tuple[str, str, int], "Usage"]
"""The latest use of resources by each running task, by group, task and attempt number."""

NO_USAGE: TaskUsage = MappingProxyType({})

PACE_OF_ALL = ("slowest_step_s", "total_samples_per_s", "imbalance", "stragglers")
"""The metrics about all ranks that the ``distflow.train.StepTimer`` of rank 0 prints. See ``pace_words``."""
PACE = ("step_s", "samples_per_s", "memory_bytes", *PACE_OF_ALL)
"""All metrics that a ``StepTimer`` prints. The first three are values of a single rank."""

_IN_ONE_LINE = 6
_STRAGGLERS = 8
_BAR_WIDTH = 20


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


def progress_of(latest: Latest) -> float | None:
    """Return the completed fraction of a rank's steps, or ``None`` if the program does not print the total number of steps."""
    for name in _TOTALS:
        total = latest.values.get(name)
        if isinstance(total, int | float) and not isinstance(total, bool) and total >= 1:
            return min(1.0, latest.step / total)
    return None


def metric_lines(group: GroupRecord, latest: Latest, now: float | None = None) -> Iterator[str]:
    """Yield the lines of ``query`` for a group: ``step 120: loss 0.25, accuracy 0.97 (rank 0)``, and its speed if known.

    If the program prints the total number of steps, a line shows the progress. With ``now`` (seconds since the epoch), this
    line contains an estimate of the remaining time.
    """
    shown = [f"{plain(name)} {value_text(value)}" for name, value in latest.values.items() if name not in (*PACE, *_TOTALS)]
    if len(shown) > _IN_ONE_LINE:
        shown = [*shown[:_IN_ONE_LINE], "…"]
    who = f"rank {latest.rank}" if latest.rank is not None else latest.task
    words = f": {', '.join(shown)}" if shown else ""
    yield f"step {latest.step}{words} ({who})"
    pace = pace_words(group, latest.values)
    if pace:
        yield pace
    share = progress_of(latest)
    if share is not None:
        full = round(share * _BAR_WIDTH)
        left = ""
        if now is not None and group.running_at is not None and not group.state.is_final and 0 < share < 1:
            left = f", about {duration_hms((now - group.running_at) * (1 - share) / share)} left"
        yield f"[{'#' * full}{'.' * (_BAR_WIDTH - full)}] {share:.0%}{left}"


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


_BARS = "▁▂▃▄▅▆▇█"
NO_BAR = "?"
"""The mark of an unknown value."""
_TOTALS = ("total_steps", "max_steps")
"""Metrics by which programs may print the total number of steps."""


def usage_header(usage: TaskUsage) -> tuple[str, ...]:
    """Return the headings of the columns for the use of resources. GPUs have columns only if the use of a GPU is known."""
    if not usage:
        return ()
    has_gpus = any(one.gpu_utilization is not None or one.gpu_memory is not None for one in usage.values())
    return ("CPU", "Memory", *(("GPU use", "GPU memory") if has_gpus else ()))


def usage_cells(usage: Usage | None, header: Sequence[str]) -> Iterator[str]:
    """Yield the cells of one task for the columns of ``header``. CPU is in cores; unknown values are empty."""
    if usage is None:
        yield from ("" for _ in header)
        return
    yield "" if usage.cpu is None else f"{usage.cpu:.1f}"
    yield "" if usage.memory is None else bytes_text(round(usage.memory))
    if "GPU use" in header:
        yield "" if usage.gpu_utilization is None else f"{usage.gpu_utilization:.0f}%"
        yield "" if usage.gpu_memory is None else bytes_text(round(usage.gpu_memory))


def spark(values: Sequence[float], low: float = 0.0, high: float = 100.0) -> str:
    """Return a line of bars, one for each value, on a scale from ``low`` to ``high``.

    >>> spark([0, 50, 100])
    '▁▅█'
    """
    shares = [(min(max(value, low), high) - low) / (high - low) for value in values]
    return "".join(_BARS[min(len(_BARS) - 1, int(share * len(_BARS)))] for share in shares)


def samples_table(samples: Sequence[tuple[ResourceSamples, Sequence[str]]]) -> str:
    """Return a table of named series of resource samples: the latest value, the mean and the largest value of each."""
    retried = any(one.attempt for one, _ in samples)
    rows = []
    for one, names in samples:
        for name in names:
            known = [value for value in one.series[name] if value is not None]
            if known:
                shown = [known[-1], sum(known) / len(known), max(known)]
                retry = (str(one.attempt),) if retried else ()
                rows.append((one.task, *retry, name, *(sample_text(name, value) for value in shown)))
    return table(("Task", *(("Retry ID",) if retried else ()), "Series", "Latest", "Mean", "Maximum"), rows)


def sample_text(name: str, value: float) -> str:
    """Return a value of a series with its unit.

    >>> sample_text("system/gpu0/memory", 61203283968), sample_text("system/disk/read", 2048)
    ('57 GiB', '2.0 KiB/s')
    """
    kind = name.rpartition("/")[2]
    if name == "system/cpu/usage":
        return f"{value:.2f} cores"
    if name == "system/memory/usage" or kind == "memory":
        return bytes_text(round(value))
    if kind in ("read", "write", "receive", "transmit"):
        return f"{bytes_text(round(value))}/s"
    unit = {"utilization": "%", "memory_activity": "%", "power": " W", "temperature": " °C", "clock": " MHz"}.get(kind, "")
    return f"{value:.4g}{unit}"


def natural_key(name: str) -> list[tuple[int, str]]:
    """Return a key that sorts names by the numbers in them.

    >>> sorted(["gpu10/power", "gpu2/power"], key=natural_key)
    ['gpu2/power', 'gpu10/power']
    """
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", name)]
