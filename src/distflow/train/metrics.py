"""Metrics of a training run: JSON objects, each on a line of standard output, and the pace of the ranks."""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median_low

import torch
import torch.distributed as dist

from distflow.train.communication.votes import check_votes_allowed, from_all
from distflow.train.world import control_group

__all__ = ["Pace", "StepTimer", "report"]

Scalar = str | int | float | bool | None
"""The types of a metric's value."""


def report(*, step: int, **values: object) -> None:
    """Print a line such as ``{"step": 3, "loss": 0.5, "rank": 0}``, if possible in one write, so that ranks do not mix lines.

    Values are scalars, or tensors and numpy arrays of shape () or (1,). NaN and infinities become strings. ``rank`` is added
    if it is not given. Raises ``TypeError``, which names the metric, for other values.
    """
    record: dict[str, Scalar] = {"step": int(step)}
    for name, value in values.items():
        record[name] = _scalar(name, value)
    record.setdefault("rank", dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK") or 0))
    sys.stdout.flush()
    data = f"{json.dumps(record)}\n".encode()
    try:
        descriptor = sys.stdout.fileno()
    except (OSError, ValueError):  # standard output was replaced by something without a descriptor
        sys.stdout.write(data.decode())
        return
    while data:
        data = data[os.write(descriptor, data) :]


def _scalar(name: str, value: object) -> Scalar:
    item = getattr(value, "item", None)
    if callable(item) and getattr(value, "shape", ()) in ((), (1,)):
        value = item()
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if value is None or isinstance(value, str | int | float | bool):
        return value
    raise TypeError(f"{name} is a {type(value).__name__}: give a number, a string, None, or a tensor of shape () or (1,)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """The speed of the ranks in the last ``steps`` steps."""

    steps: int
    step_s: tuple[float, ...]
    """Mean time of one step in seconds, by rank, without the waiting time if the loop measures ``work``."""
    samples_per_s: tuple[float, ...]
    """Samples of each rank, divided by the elapsed time of the slowest rank, which includes waiting."""
    memory_bytes: tuple[int, ...]
    """Peak memory of each rank's process since its start: GPU memory that torch allocated, or else resident memory."""

    @property
    def imbalance(self) -> float:
        """The slowest rank's time divided by the mean; 1.0 is balanced."""
        mean = sum(self.step_s) / len(self.step_s)
        return max(self.step_s) / mean if mean else 1.0

    def stragglers(self, factor: float = 1.2) -> tuple[int, ...]:
        """Return the ranks that took more than ``factor`` times the lower median, slowest first."""
        limit = factor * median_low(self.step_s)
        slow = [rank for rank, seconds in enumerate(self.step_s) if seconds > limit]
        return tuple(sorted(slow, key=lambda rank: -self.step_s[rank]))

    def of_rank(self, rank: int) -> dict[str, Scalar]:
        """Return a rank's own metrics for ``report``."""
        return {
            "step_s": round(self.step_s[rank], 6),
            "samples_per_s": round(self.samples_per_s[rank], 3),
            "memory_bytes": self.memory_bytes[rank],
        }

    @property
    def of_all(self) -> dict[str, Scalar]:
        """The metrics of all ranks together for ``report``; stragglers as in ``3,1``."""
        return {
            "slowest_step_s": round(max(self.step_s), 6),
            "total_samples_per_s": round(sum(self.samples_per_s), 3),
            "imbalance": round(self.imbalance, 3),
            "stragglers": ",".join(map(str, self.stragglers())),
        }


class StepTimer:
    """Measures steps. Every ``every`` steps, each rank reports its own metrics, and rank 0 also those of all ranks together.

    If ``with timer.work():`` encloses the rank's own work, ``step_s`` omits other time, such as reductions that wait for
    the slowest rank. Call ``timer.step(samples)`` after each step on all ranks; every ``every``-th call is a collective.
    """

    def __init__(self, every: int = 50) -> None:
        if every < 1:
            raise ValueError(f"every={every}: give 1 or more")
        self._every = every
        self._steps = self._samples = 0
        self._begin = time.perf_counter()
        self._work_s: float | None = None

    @contextmanager
    def work(self) -> Iterator[None]:
        """Measure this rank's own work in a step."""
        _synchronize()
        entered = time.perf_counter()
        try:
            yield
        finally:
            _synchronize()
            self._work_s = (self._work_s or 0.0) + time.perf_counter() - entered

    def step(self, samples: int = 0) -> Pace | None:
        """End a step of ``samples`` samples of this rank. Every ``every`` steps, report and return the pace, else ``None``."""
        self._steps += 1
        self._samples += samples
        if self._steps % self._every:
            return None
        elapsed = time.perf_counter() - self._begin
        mine = elapsed if self._work_s is None else self._work_s
        check_votes_allowed()
        figures = mine / self._every, elapsed, self._samples, _peak_memory()
        rows = from_all(figures, control_group())
        slowest = max(row[1] for row in rows)
        pace = Pace(
            steps=self._every,
            step_s=tuple(row[0] for row in rows),
            samples_per_s=tuple(row[2] / slowest for row in rows),
            memory_bytes=tuple(row[3] for row in rows),
        )
        rank = dist.get_rank() if dist.is_initialized() else 0
        report(step=self._steps, **pace.of_rank(rank), **(pace.of_all if rank == 0 else {}))
        self._samples, self._work_s = 0, None
        self._begin = time.perf_counter()
        return pace


def _synchronize() -> None:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def _peak_memory() -> int:
    """Return the peak memory of this rank in bytes."""
    if torch.cuda.is_initialized():
        return torch.cuda.max_memory_allocated()
    import resource  # noqa: PLC0415 (not on every system that torch runs on)

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
