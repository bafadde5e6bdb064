"""Metrics that programs print as lines of JSON, read from the mirrored logs.

A line counts if it is a JSON object with a whole number ``step``: ``{"step": 3, "loss": 0.5, "rank": 0}``.
``distflow.train.report`` prints such lines, and any other program may do so. All other output is ignored. A launcher's prefix
such as ``[default0]:`` (torchrun's ``--tee``) may precede the object.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping

from msgspec import Struct, field

from distflow.state.logs import LogLine

__all__ = ["Latest", "Metric", "Scalar", "latest", "number", "parse_metric", "read_metrics"]

Scalar = str | int | float | bool | None
"""The possible values of a metric."""

_MAX_LINE_CHARS = 16 << 10
_MAX_VALUES = 64
_MAX_TEXT_CHARS = 200
_MAX_EXACT_INT = 1 << 53
"""Larger whole numbers are not exact as floats. Such a value becomes a text, and a line with such a step is ignored."""
_PREFIX = re.compile(r"\[[\w ./-]{1,64}\]:?\s*")


class Metric(Struct, frozen=True, kw_only=True):
    """One line of metrics."""

    task: str
    attempt: int
    rank: int | None
    """The rank in the line, or else the rank that printed the line; ``None`` if neither is known."""
    step: int
    values: Mapping[str, Scalar]
    """Without ``step`` and ``rank``. NaN and infinities are texts, because JSON cannot represent them."""
    time: float | None
    """Seconds since the epoch by the node's clock; ``None`` if the node could not record it."""


class Latest(Struct, kw_only=True):
    """The latest metrics of one rank of a task."""

    task: str
    attempt: int
    rank: int | None
    step: int = 0
    time: float | None = None
    values: dict[str, Scalar] = field(default_factory=dict)
    """The latest value of each name; some may be older than ``step``."""

    def update(self, metric: Metric) -> None:
        """Update with a later line. After 256 names, new names are ignored."""
        self.step, self.time = metric.step, metric.time
        for name, value in metric.values.items():
            if name in self.values or len(self.values) < 4 * _MAX_VALUES:
                self.values[name] = value


def parse_metric(text: str) -> tuple[int, int | None, dict[str, Scalar]] | None:
    """Return step, rank and values of a line, or ``None`` if it is not a metric.

    Lists and objects are left out, long texts are cut, and only the first 64 values are kept. A line of more than 16,384
    characters is not a metric.

    >>> parse_metric('{"step": 3, "loss": 0.5, "rank": 1}')
    (3, 1, {'loss': 0.5})
    >>> parse_metric("epoch 3: loss 0.5") is None
    True
    """
    text = text.strip()
    if not text.endswith("}") or len(text) > _MAX_LINE_CHARS:
        return None
    if text.startswith("["):
        prefix = _PREFIX.match(text)
        text = text[prefix.end() :] if prefix else text
    if not text.startswith("{") or '"step"' not in text:
        return None
    import json  # noqa: PLC0415 (`query` needs it only for workflows with metrics)

    try:
        record = json.loads(text)
    except (ValueError, RecursionError):
        return None
    step, rank = _whole(record.pop("step", None)), _whole(record.pop("rank", None))
    if step is None:
        return None
    values = {name: _scalar(value) for name, value in record.items() if not isinstance(value, list | dict)}
    return step, rank, dict(list(values.items())[:_MAX_VALUES])


def read_metrics(lines: Iterable[LogLine], *, rank: int | None = None) -> Iterator[Metric]:
    """Yield the metrics in the lines of logs, in their order; with ``rank``, only those of that rank."""
    for line in lines:
        found = parse_metric(line.text)
        if found is None:
            continue
        step, named, values = found
        line_rank = line.rank if named is None else named
        if rank in (None, line_rank):
            yield Metric(task=line.task, attempt=line.attempt, rank=line_rank, step=step, values=values, time=line.time)


def latest(metrics: Iterable[Metric]) -> list[Latest]:
    """Return the latest metrics of each rank of each task, tasks in the order of their first line, ranks by number.

    Attempts must come in order: the first line of a later attempt discards the metrics of the earlier one.
    """
    tasks: dict[str, dict[int | None, Latest]] = {}
    attempts: dict[str, int] = {}
    for metric in metrics:
        ranks = tasks.setdefault(metric.task, {})
        if metric.attempt > attempts.get(metric.task, 0):
            ranks.clear()
        attempts[metric.task] = metric.attempt
        if metric.rank not in ranks:
            ranks[metric.rank] = Latest(task=metric.task, attempt=metric.attempt, rank=metric.rank)
        ranks[metric.rank].update(metric)
    return [
        one for ranks in tasks.values() for _, one in sorted(ranks.items(), key=lambda pair: (pair[0] or 0, pair[0] is None))
    ]


def number(value: Scalar) -> float | None:
    """Return the value of a metric as a number, or ``None`` for a text (such as NaN) and for ``null``. ``True`` is 1."""
    return float(value) if isinstance(value, int | float) else None


def _whole(value: object) -> int | None:
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _MAX_EXACT_INT:
        return value
    return None


def _scalar(value: Scalar) -> Scalar:
    if isinstance(value, bool):
        return value
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, int) and abs(value) > _MAX_EXACT_INT:
        return str(value)[:_MAX_TEXT_CHARS]
    return value[:_MAX_TEXT_CHARS] if isinstance(value, str) else value
