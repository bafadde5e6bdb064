"""The metrics that tasks print as lines of JSON."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from distflow.client.client import Client
from distflow.client.logs import Tasks, log_sources
from distflow.errors import NotFound
from distflow.state.logs import read_lines
from distflow.state.metrics import Latest, Metric, latest, number, read_metrics

if TYPE_CHECKING:
    from distflow.state.record import WorkflowRecord

__all__ = ["Latest", "Metric", "MetricSeries", "find_metrics", "number"]


class MetricSeries:
    """Metrics of some tasks of a workflow, read from its logs as often as they are iterated."""

    def __init__(
        self,
        client: Client,
        record: WorkflowRecord,
        tasks: Tasks,
        *,
        rank: int | None,
        keys: Collection[str],
        attempt: int | None,
    ) -> None:
        """Read the logs once, for the latest values."""
        self._sources = log_sources(client, record, tasks, attempt)
        self._rank = rank
        self._keys = keys
        self.names: dict[str, None] = {}
        """Every name that was met, in order."""
        self.latest = latest(iter(self))
        """The latest values of each task and rank."""

    def __iter__(self) -> Iterator[Metric]:
        """Yield one metric after the other, task by task and attempt by attempt, with the wanted values only."""
        # One log after the other: whatever the nodes' clocks say, attempts stay in their order.
        for source in self._sources:
            for metric in read_metrics(read_lines([source]), rank=self._rank):
                values = {name: value for name, value in metric.values.items() if not self._keys or name in self._keys}
                if self._keys and not values:
                    continue
                self.names.update(dict.fromkeys(values))
                yield replace(metric, values=values) if self._keys else metric

    def every_name(self) -> set[str]:
        """Return all names that these tasks printed, wanted or not."""
        return {name for source in self._sources for one in read_metrics(read_lines([source])) for name in one.values}

    def write_tensorboard(self, folder: Path) -> int:
        """Write the numbers below a new directory, for TensorBoard; return how many there were. Raises ``InputError``."""
        from distflow.client.tensorboard import write_tensorboard

        return write_tensorboard(folder, self)


def find_metrics(
    client: Client,
    record: WorkflowRecord,
    tasks: Tasks,
    *,
    rank: int | None = None,
    keys: Collection[str] = (),
    attempt: int | None = None,
) -> MetricSeries:
    """Return the metrics that tasks printed.

    Args:
        client: Where the workflow is known.
        record: The workflow.
        tasks: Which of its tasks (see ``choose_tasks``).
        rank: Only those of this rank.
        keys: Only values of these names.
        attempt: Only of this attempt, counted from 0; else of all.

    Raises:
        NotFound: when the tasks printed metrics, but none of these names.

    """
    found = MetricSeries(client, record, tasks, rank=rank, keys=keys, attempt=attempt)
    if keys and not found.latest:
        # Which there are is only asked where one is missing.
        known = sorted(found.every_name())
        unknown = [key for key in keys if key not in known]
        if known and unknown:
            from distflow.documents.text import did_you_mean

            raise NotFound(f"{record.id} has no metric {unknown[0]!r}", hint=did_you_mean(unknown[0], known, what="metrics"))
    return found
