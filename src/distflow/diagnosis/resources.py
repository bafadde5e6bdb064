"""Findings in the use of resources: idle GPUs, slow input, throttling, unequal GPUs, growing memory, GPU errors.

Findings are not failures: a workflow can have them while it runs and after it completed. This module does no I/O.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from statistics import median

from msgspec import Struct

from distflow.diagnosis.model import Diagnosis
from distflow.diagnosis.rules import Rule
from distflow.documents.quantities import bytes_text, count_text, duration_hms, seconds_text
from distflow.documents.text import few, ranges
from distflow.state.samples import ResourceSamples

__all__ = ["RESOURCE_RULES", "RankPace", "ResourceUse", "find_inefficiencies"]

_GPU = re.compile(r"system/gpu(\d+)/utilization")
_WARM_UP_S = 60.0
"""Seconds at the beginning of a run that most rules ignore, because programs first import packages and load data."""
_WINDOW_S = 1800.0
"""The maximum duration of the part at the end of a run that most rules use."""
_LEAST_S = 120.0
"""The minimum duration of that part."""
_GROWTH_S = 900.0
"""The minimum duration, after the warm-up, of a run whose memory growth is examined."""
_BINS = 8
_IDLE_PERCENT = 5.0
_BUSY_PERCENT = 70.0
_FULL_CPU = 0.85
_ONE_CORE = (0.85, 1.3)
"""The range of the busy CPU cores for each GPU if only the main process of each rank works."""
_THROTTLED_SHARE = 0.1
_SLOW_GPU_RATIO = 0.85
_LONG_STEP_RATIO = 1.15
_GROWTH = 0.05
"""The minimum growth of memory, as a fraction of the memory after the first quarter of the run."""
_SOON_S = 7 * 86400.0
"""The time until the memory is full is shown only if it is shorter than this (seconds)."""
_MOST_SHOWN = 4

IDLE = Rule(
    key="gpu-idle",
    shows="GPUs that stayed below 5% utilization for the last half hour (in a shorter run: after its first minute)",
    cause="GPUs are reserved but not used",
    remedy="If only some GPUs are idle, start one rank for each GPU, or request fewer GPUs. If all are idle, "
    "`distflow workflow stacks <id>` shows what the ranks do: they may load data, wait, or compute on the CPU (no `.cuda()`).",
)
INPUT = Rule(
    key="input-bound",
    shows="GPU utilization below 70%, and CPUs in full use or one busy core for each GPU",
    cause="the GPUs wait for the CPUs",
    remedy="Speed up the loading of data: more workers of the data loader (`num_workers`), `pin_memory`, data that is decoded "
    "or tokenized beforehand, or faster storage. `distflow workflow stacks <id>` shows where the ranks spend their time.",
)
THERMAL = Rule(
    key="gpu-throttled",
    shows="a GPU that its driver slowed down because of its temperature in at least 10% of the samples",
    cause="GPUs are slow because they are too hot",
    remedy="Check the cooling and the fans of the node (`nvidia-smi -q -d TEMPERATURE,PERFORMANCE`), lower the power limit "
    "(`nvidia-smi -pl`), or leave the node out. All ranks of a gang wait for the slowest GPU.",
)
UNEQUAL = Rule(
    key="ranks-unequal",
    shows="a GPU whose clock or utilization is below 85% of the median of the gang, or a rank whose steps take 15% longer "
    "(`StepTimer`)",
    cause="some ranks of the gang are slower than the others",
    remedy="All ranks wait for the slowest one. Check the split of the work if the utilization differs, and the power limit, "
    "the temperature and other programs on that GPU if the clock differs. `distflow.train.StepTimer` measures the steps of "
    "each rank.",
)
GROWTH = Rule(
    key="memory-growth",
    shows="memory of a task or GPU that grows steadily after the first quarter of a run of 16 minutes or longer",
    cause="memory grows steadily",
    remedy="Look for data that is kept in each step: losses that keep their graph (use `.item()` or `.detach()`), growing "
    "lists and caches, workers of the data loader that copy a Python list. Checkpoint before the memory is full.",
)
ERRORS = Rule(
    key="gpu-error",
    shows="an Xid of the driver, or a new uncorrected memory error of a GPU",
    cause="a GPU reported errors",
    remedy="Xid 13, 31 and 43 are usually faults of the program. For others, such as 48, 63, 64, 74, 79, 94 and 95, leave the "
    "node out and check it: `dcgmi diag -r 3`, https://docs.nvidia.com/deploy/xid-errors/.",
)
RESOURCE_RULES = (ERRORS, THERMAL, IDLE, INPUT, UNEQUAL, GROWTH)


class ResourceUse(Struct, frozen=True, kw_only=True):
    """The resource samples of one task of a group."""

    node: str
    samples: ResourceSamples

    @property
    def place(self) -> str:
        """The task and its node, such as ``worker on gpu2``."""
        return f"{self.samples.task} on {self.node}" if self.node else self.samples.task


class RankPace(Struct, frozen=True, kw_only=True):
    """The mean duration of one rank's steps, as its ``StepTimer`` reported it.

    If the training loop uses ``StepTimer.work()``, the time in which the rank waits for other ranks is not included.
    """

    task: str
    node: str
    rank: int
    step_s: float


class _Gpu(Struct, frozen=True):
    """One GPU in the recent part of a run."""

    use: ResourceUse
    number: int
    values: Mapping[str, Sequence[float]]
    """The known values by name, such as ``clock``."""

    def mean(self, name: str) -> float | None:
        values = self.values.get(name)
        return sum(values) / len(values) if values else None

    @property
    def utilization(self) -> float:
        return self.mean("utilization") or 0.0


def find_inefficiencies(uses: Sequence[ResourceUse], paces: Sequence[RankPace] = ()) -> tuple[Diagnosis, ...]:
    """Return the findings in the use of resources by the tasks of one attempt of a group, the most serious first."""
    recent = [part for use in uses if (part := _recent(use)) is not None]
    gpus = [gpu for use in recent for gpu in _gpus(use)]
    found: dict[str, list[tuple[str, str]]] = {rule.key: [] for rule in RESOURCE_RULES}
    for use in uses:
        found[ERRORS.key] += ((use.samples.task, words) for words in _errors(use))
        found[GROWTH.key] += ((use.samples.task, words) for words in _growth(use))
    for use in recent:
        own = [gpu for gpu in gpus if gpu.use is use]
        for rule, words in ((THERMAL, _thermal(use, own)), (IDLE, _idle(use, own)), (INPUT, _input_bound(use, own))):
            if words:
                found[rule.key].append((use.samples.task, words))
    found[UNEQUAL.key] += (*_slow_ranks(paces), *_unequal(gpus))
    return tuple(
        Diagnosis(
            key=rule.key,
            cause=rule.cause,
            found=few([words for _, words in found[rule.key]], "; ", most=_MOST_SHOWN),
            remedy=rule.remedy,
            task=found[rule.key][0][0],
        )
        for rule in RESOURCE_RULES
        if found[rule.key]
    )


def _recent(use: ResourceUse) -> ResourceUse | None:
    """Return the last part of a run, at most half an hour, without the run's first minute.

    ``None`` if that part is too short.
    """
    times = use.samples.times
    begin = max(times[0] + _WARM_UP_S, times[-1] - _WINDOW_S)
    first = next((position for position, at in enumerate(times) if at >= begin), len(times))
    if times[-1] - begin < _LEAST_S:
        return None
    series = {name: values[first:] for name, values in use.samples.series.items()}
    part = ResourceSamples(
        task=use.samples.task, attempt=use.samples.attempt, times=times[first:], series=series, limits=use.samples.limits
    )
    return ResourceUse(node=use.node, samples=part)


def _gpus(use: ResourceUse) -> Iterator[_Gpu]:
    series = use.samples.series
    for number in sorted(int(match[1]) for match in map(_GPU.fullmatch, series) if match):
        prefix = f"system/gpu{number}/"
        own = {name.removeprefix(prefix): values for name, values in series.items() if name.startswith(prefix)}
        values = {name: [one for one in samples if one is not None] for name, samples in own.items()}
        if values["utilization"]:
            yield _Gpu(use, number, values)


def _gpu_names(numbers: Sequence[int]) -> str:
    return f"GPU{'s' if len(numbers) > 1 else ''} {ranges(numbers)}"


def _errors(use: ResourceUse) -> Iterator[str]:
    for name, values in use.samples.series.items():
        device, _, kind = name.removeprefix("system/").partition("/")
        known = [value for value in values if value is not None]
        if not device.startswith("gpu") or not known:
            continue
        who = f"GPU {device.removeprefix('gpu')} of {use.place}"
        if kind == "xid" and known[-1] > 0:
            yield f"{who} reported Xid {known[-1]:.0f}"
        elif kind == "ecc_errors" and known[-1] > known[0]:
            yield f"{who} had {count_text(round(known[-1] - known[0]), 'new uncorrected memory error')}"


def _thermal(use: ResourceUse, gpus: Sequence[_Gpu]) -> str:
    hot = [gpu for gpu in gpus if (gpu.mean("throttle_thermal") or 0.0) >= _THROTTLED_SHARE]
    if not hot:
        return ""
    share = max(gpu.mean("throttle_thermal") or 0.0 for gpu in hot)
    warmest = max((one for gpu in hot for one in gpu.values.get("temperature", ())), default=None)
    up_to = "up to " if len(hot) > 1 else ""
    degrees = f" at up to {warmest:.0f} °C" if warmest is not None else ""
    return f"{_gpu_names([gpu.number for gpu in hot])} of {use.place}{degrees}, slowed down {up_to}{share:.0%} of the time"


def _idle(use: ResourceUse, gpus: Sequence[_Gpu]) -> str:
    idle = [gpu for gpu in gpus if max(gpu.values["utilization"]) < _IDLE_PERCENT]
    if not idle:
        return ""
    busy = [gpu for gpu in gpus if gpu not in idle]
    below = f"stayed below {_IDLE_PERCENT:.0f}% utilization for the last {_span(use)}"
    words = f"{_gpu_names([gpu.number for gpu in idle])} of {use.place} {below}"
    if not busy:
        return words
    mean = sum(gpu.utilization for gpu in busy) / len(busy)
    return f"{words}, {_gpu_names([gpu.number for gpu in busy])} {'were' if len(busy) > 1 else 'was'} {mean:.0f}% busy"


def _input_bound(use: ResourceUse, gpus: Sequence[_Gpu]) -> str:
    busy = [gpu for gpu in gpus if max(gpu.values["utilization"]) >= _IDLE_PERCENT]
    known = [value for value in use.samples.series.get("system/cpu/usage", ()) if value is not None]
    limit = use.samples.limits.get("system/cpu/limit", 0.0)
    if not busy or not known or limit <= 0:
        return ""
    mean, cores = sum(gpu.utilization for gpu in busy) / len(busy), sum(known) / len(known)
    if mean >= _BUSY_PERCENT:
        return ""
    verb = "were" if len(busy) > 1 else "was"
    words = f"{_gpu_names([gpu.number for gpu in busy])} of {use.place} {verb} {mean:.0f}% busy in the last {_span(use)}"
    if cores >= _FULL_CPU * limit:
        return f"{words}, while {cores:.0f} of {limit:.0f} CPUs were in use"
    if _ONE_CORE[0] <= cores / len(busy) <= _ONE_CORE[1]:
        return f"{words}, with one busy core for each GPU: the data may be loaded in the main process of each rank"
    return ""


def _unequal(gpus: Sequence[_Gpu]) -> Iterator[tuple[str, str]]:
    """Yield the task and a message for each GPU that is much slower than the median. Idle GPUs are not compared."""
    busy = [gpu for gpu in gpus if max(gpu.values["utilization"]) >= _IDLE_PERCENT]
    for name, unit in (("clock", " MHz"), ("utilization", "%")):
        known = [(gpu, mean) for gpu in busy if (mean := gpu.mean(name)) is not None]
        if len(known) < 2:
            continue
        middle = median(mean for _, mean in known)
        for gpu, mean in known:
            if mean < _SLOW_GPU_RATIO * middle and middle > 0:
                words = f"{name} of GPU {gpu.number} of {gpu.use.place} is {mean:.0f}{unit}, the median is {middle:.0f}{unit}"
                yield gpu.use.samples.task, words


def _slow_ranks(paces: Sequence[RankPace]) -> Iterator[tuple[str, str]]:
    middle = median(one.step_s for one in paces) if len(paces) > 1 else 0.0
    for one in paces:
        if one.step_s > _LONG_STEP_RATIO * middle > 0:
            place = f"{one.task} on {one.node}" if one.node else one.task
            yield one.task, f"a step of rank {one.rank} ({place}) takes {one.step_s:.3g} s, the median is {middle:.3g} s"


def _growth(use: ResourceUse) -> Iterator[str]:
    times, limits = use.samples.times, use.samples.limits
    if times[-1] - times[0] < _WARM_UP_S + _GROWTH_S:
        return
    for name, values in use.samples.series.items():
        device, _, kind = name.removeprefix("system/").partition("/")
        if kind != "memory" and name != "system/memory/usage":
            continue
        points = [(at, value) for at, value in zip(times, values, strict=True) if value is not None]
        points = [point for point in points if point[0] >= times[0] + (times[-1] - times[0]) / 4]
        bins = _binned(points)
        if len(bins) < _BINS or any(later <= earlier for (_, earlier), (_, later) in itertools.pairwise(bins)):
            continue
        (begin, low), (end, high) = bins[0], bins[-1]
        speed = (high - low) / (end - begin)
        if high < low * (1 + _GROWTH):
            continue
        what = f"the memory of {use.place}" if device == "memory" else f"the memory of GPU {device[3:]} of {use.place}"
        words = f"{what} grows by {bytes_text(speed * 3600)} an hour, now {bytes_text(high)}"
        limit = limits.get("system/memory/limit" if device == "memory" else f"system/{device}/memory_limit", 0.0)
        left_s = (limit - high) / speed
        if limit > 0 and 0 < left_s < _SOON_S:
            words += f" of {bytes_text(limit)}; it would be full in {duration_hms(left_s)}"
        yield words


def _binned(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Divide the points into equal parts, and return the mean time and value of each part; nothing for too few points."""
    if len(points) < 2 * _BINS:
        return []
    edges = [number * len(points) // _BINS for number in range(_BINS + 1)]
    parts = [points[start:end] for start, end in itertools.pairwise(edges)]
    return [(sum(at for at, _ in part) / len(part), sum(value for _, value in part) / len(part)) for part in parts]


def _span(use: ResourceUse) -> str:
    times = use.samples.times
    return seconds_text(60 * round((times[-1] - times[0]) / 60))
