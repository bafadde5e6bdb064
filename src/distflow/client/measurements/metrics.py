"""Read the metrics that tasks print as JSON lines."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING

from distflow.client.client import Client
from distflow.client.logs import Tasks, log_sources
from distflow.errors import NotFound
from distflow.state.logs import read_lines
from distflow.state.metrics import Latest, Metric, latest, number, read_metrics
from distflow.structs import replace

if TYPE_CHECKING:
    from distflow.state.record import WorkflowRecord

__all__ = ["Latest", "Metric", "MetricSeries", "find_metrics", "number"]


class MetricSeries:
    """The metrics of some tasks of a workflow. Each iteration reads them again from the logs."""

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
        """Read the logs once to find the latest values. The arguments are those of ``find_metrics``."""
        self._sources = log_sources(client, record, tasks, attempt)
        self._rank = rank
        self._keys = keys
        self.names: dict[str, None] = {}
        """The names of all metrics that were yielded so far, in order of appearance."""
        self.latest = latest(iter(self))
        """The latest values for each task and rank."""

    def __iter__(self) -> Iterator[Metric]:
        """Yield the metrics with the requested names, one task and attempt after the other."""
        # Read one log after the other. This keeps the order of attempts even if the nodes' clocks differ.
        for source in self._sources:
            for metric in read_metrics(read_lines([source]), rank=self._rank):
                values = {name: value for name, value in metric.values.items() if not self._keys or name in self._keys}
                if self._keys and not values:
                    continue
                self.names.update(dict.fromkeys(values))
                yield replace(metric, values=values) if self._keys else metric

    def every_name(self) -> set[str]:
        """Return the names of all metrics of these tasks, including names that were not requested."""
        return {name for source in self._sources for one in read_metrics(read_lines([source])) for name in one.values}


def find_metrics(
    client: Client,
    record: WorkflowRecord,
    tasks: Tasks,
    *,
    rank: int | None = None,
    keys: Collection[str] = (),
    attempt: int | None = None,
) -> MetricSeries:
    """Return the metrics in the output of tasks.

    Args:
        client: The client whose store has the workflow.
        record: The workflow.
        tasks: The tasks to read (see ``choose_tasks``).
        rank: Return only metrics of this rank. Default: all ranks.
        keys: Return only metrics with these names. Default: all names.
        attempt: Return only metrics of this attempt, counted from 0. Default: all attempts.

    Raises:
        NotFound: if no metric matches, and a name in ``keys`` is not among the metrics that the tasks printed. Tasks that
            printed no metrics are not an error.

    """
    found = MetricSeries(client, record, tasks, rank=rank, keys=keys, attempt=attempt)
    if keys and not found.latest:
        # Collecting all names reads all logs again, so it is done only for this error.
        known = sorted(found.every_name())
        unknown = [key for key in keys if key not in known]
        if known and unknown:
            from distflow.documents.text import did_you_mean

            raise NotFound(f"{record.id} has no metric `{unknown[0]}`", hint=did_you_mean(unknown[0], known, what="metrics"))
    return found
