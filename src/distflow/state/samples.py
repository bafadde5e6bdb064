"""Resource samples of attempts: the use of CPU, memory, disk, network and GPUs, read from the mirrored ``output.samples``.

``runtime.guard.sampler`` describes the format. The file comes from a node, so lines that are not valid are ignored.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Mapping, Sequence

import msgspec
from msgspec import Struct

from distflow.runtime.files import log_files
from distflow.state.logs import LogSource

__all__ = ["ResourceSamples", "Usage", "last_samples", "parse_samples", "read_samples", "thinned", "usage_of"]

_NAME = re.compile(r"system/[a-z0-9_]{1,40}(?:/[a-z0-9_]{1,40})?")
_MOST_COLUMNS = 1024
_TAIL_BYTES = 96 << 10
"""Enough for the sampler's header, which is repeated, and for some minutes of a task with 8 GPUs."""
_MOST_BYTES = 32 << 20
_MOST_VALUES = 8 << 20
"""The maximum number of values to read from one file. A task with 8 GPUs writes a fourth of them in three weeks."""
_RECENT = 20


class ResourceSamples(Struct, frozen=True, kw_only=True):
    """The resource samples of one attempt of one task."""

    task: str
    attempt: int
    times: Sequence[float]
    """Seconds since the epoch by the node's clock, one for each sample."""
    series: Mapping[str, Sequence[float | None]]
    """The values by the name of the series, as many as ``times``; ``None`` where a value is unknown."""
    limits: Mapping[str, float]
    """Values that do not change, such as ``system/cpu/limit``."""

    def latest(self) -> dict[str, float]:
        """Return the last known value of each series."""
        found = {}
        for name, values in self.series.items():
            if (value := next((one for one in reversed(values) if one is not None), None)) is not None:
                found[name] = value
        return found


class Usage(Struct, frozen=True, kw_only=True):
    """The latest use of resources by one task."""

    time: float
    """Time of the sample in seconds since the epoch, by the node's clock."""
    cpu: float | None
    """Cores in use."""
    memory: float | None
    """Bytes of memory in use."""
    gpu_utilization: float | None
    """Percent, the mean of the task's GPUs."""
    gpu_memory: float | None
    """Bytes in use on all GPUs of the task."""
    recent: Sequence[float]
    """Recent values, the oldest first: ``gpu_utilization``, or for a task without GPUs, the percentage of the cores in use."""


def usage_of(samples: ResourceSamples) -> Usage:
    """Return the latest use of resources. ``samples`` must not be empty."""
    latest = samples.latest()
    rows: Sequence[Sequence[float | None]] = [samples.series[name] for name in samples.series if _is_gpu(name, "utilization")]
    scale = 1.0
    if not rows and "system/cpu/usage" in samples.series:
        rows, scale = [samples.series["system/cpu/usage"]], 100 / max(1.0, samples.limits.get("system/cpu/limit", 1.0))
    means = [_mean(values) for values in zip(*rows, strict=True)]
    gpus = [value for name, value in latest.items() if _is_gpu(name, "utilization")]
    memory = [value for name, value in latest.items() if _is_gpu(name, "memory")]
    return Usage(
        time=samples.times[-1],
        cpu=latest.get("system/cpu/usage"),
        memory=latest.get("system/memory/usage"),
        gpu_utilization=_mean(gpus),
        gpu_memory=sum(memory) if memory else None,
        recent=tuple(value * scale for value in means[-_RECENT:] if value is not None),
    )


def _is_gpu(name: str, what: str) -> bool:
    return name.startswith("system/gpu") and name.endswith("/" + what)


def read_samples(source: LogSource) -> ResourceSamples | None:
    """Return all mirrored samples of an attempt, or ``None`` if there are none."""
    return _read(source, 0)


def last_samples(source: LogSource, most: int | None = None) -> ResourceSamples | None:
    """Return the last samples of an attempt, at most ``most``; ``None`` if there are none.

    Reads only the last 96 KiB of a larger file, if these have samples, otherwise the whole file.
    """
    try:
        size = (source.folder / log_files.SAMPLES).stat().st_size
    except OSError:
        return None
    return (_read(source, size - _TAIL_BYTES, most) if size > _TAIL_BYTES else None) or _read(source, 0, most)


def _read(source: LogSource, start: int, most: int | None = None) -> ResourceSamples | None:
    try:
        with (source.folder / log_files.SAMPLES).open("rb") as file:
            file.seek(start)
            data = file.read(_MOST_BYTES)
    except OSError:
        return None
    lines = data.split(b"\n")[1 if start else 0 :]
    if most is not None:  # a later header has all columns of an earlier header
        headers = [line for line in lines if line.startswith(b"{")]
        lines = headers[-1:] + [line for line in lines if line.startswith(b"[")][-most:]
    times, series, limits = parse_samples(lines)
    if not times:
        return None
    return ResourceSamples(task=source.task, attempt=source.attempt, times=times, series=series, limits=limits)


def parse_samples(lines: Iterable[bytes]) -> tuple[list[float], dict[str, list[float | None]], dict[str, float]]:
    """Return times, series and limits of the lines of a file of samples. Lines before the first header are ignored.

    >>> parse_samples([b'{"columns":["time","system/cpu/usage"],"limits":{"system/cpu/limit":8}}', b"[1700000000.5,1.25]"])
    ([1700000000.5], {'system/cpu/usage': [1.25]}, {'system/cpu/limit': 8.0})
    """
    times: list[float] = []
    series: dict[str, list[float | None]] = {}
    limits: dict[str, float] = {}
    columns: list[list[float | None] | None] = []
    for line in lines:
        try:
            row = msgspec.json.decode(line) if line else None
        except (ValueError, RecursionError):
            continue
        if isinstance(row, dict):
            columns = [_column(name, series, len(times)) for name in _list(row.get("columns"))[1 : _MOST_COLUMNS + 1]]
            fixed = row.get("limits")
            if isinstance(fixed, dict):
                limits.update({name: value for name in fixed if (value := _number(fixed[name])) is not None and _is_name(name)})
        elif len(times) * len(series) >= _MOST_VALUES:
            break
        elif isinstance(row, list) and columns and (at := _number(row[0] if row else None)) is not None:
            times.append(at)
            for column, value in zip(columns, row[1:], strict=False):
                if column is not None and len(column) < len(times):
                    column.append(_number(value))
            for values in series.values():
                if len(values) < len(times):
                    values.append(None)
    return times, series, limits


def _column(name: object, series: dict[str, list[float | None]], missing: int) -> list[float | None] | None:
    """Return the series of a column, which is created if it is new; ``None`` if the name is not valid."""
    if not isinstance(name, str) or not _is_name(name):
        return None
    if name not in series and (len(series) >= _MOST_COLUMNS or (len(series) + 1) * missing > _MOST_VALUES):
        return None
    return series.setdefault(name, [None] * missing)


def _is_name(name: str) -> bool:
    return _NAME.fullmatch(name) is not None


def _list(value: object) -> list[object]:
    return value if isinstance(value, list) else []


def _number(value: object) -> float | None:
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    try:
        found = float(value)
    except OverflowError:
        return None
    return found if math.isfinite(found) else None


def thinned(samples: ResourceSamples, most: int) -> ResourceSamples:
    """Return at most ``most`` samples, each the mean of consecutive samples, with the time of the last of these."""
    count = len(samples.times)
    if count <= most:
        return samples
    edges = [number * count // most for number in range(most + 1)]
    spans = [*itertools.pairwise(edges)]
    return ResourceSamples(
        task=samples.task,
        attempt=samples.attempt,
        times=[samples.times[end - 1] for _, end in spans],
        series={name: [_mean(values[start:end]) for start, end in spans] for name, values in samples.series.items()},
        limits=samples.limits,
    )


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
