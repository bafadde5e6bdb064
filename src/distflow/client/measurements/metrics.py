"""Read the metrics that tasks print as JSON lines, and write them as TensorBoard event files."""

from __future__ import annotations

import importlib
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distflow.client.client import Client
from distflow.client.logs import Tasks, log_sources
from distflow.errors import InputError, NotFound
from distflow.state.logs import read_lines
from distflow.state.metrics import Latest, Metric, latest, number, read_metrics
from distflow.structs import replace

if TYPE_CHECKING:
    from distflow.state.record import WorkflowRecord

__all__ = ["Latest", "Metric", "MetricSeries", "find_metrics", "number", "write_tensorboard"]


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
        """The names of all metrics read so far, in order of appearance."""
        self.latest = latest(iter(self))
        """The latest values for each task and rank."""

    def __iter__(self) -> Iterator[Metric]:
        """Yield metrics by task and attempt, only with the requested names."""
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

    def write_tensorboard(self, folder: Path) -> int:
        """Write the numeric metrics for TensorBoard.

        Args:
            folder: The directory to create.

        Returns:
            The number of values written.

        Raises:
            InputError: if tensorboard is not installed, if ``folder`` exists, or if it cannot be written.

        """
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
    """Return the metrics in the output of tasks.

    Args:
        client: The client whose store has the workflow.
        record: The workflow.
        tasks: The tasks to read (see ``choose_tasks``).
        rank: Return only metrics of this rank. Default: all ranks.
        keys: Return only metrics with these names. Default: all names.
        attempt: Return only metrics of this attempt, counted from 0. Default: all attempts.

    Raises:
        NotFound: if the tasks printed metrics, but none with these names.

    """
    found = MetricSeries(client, record, tasks, rank=rank, keys=keys, attempt=attempt)
    if keys and not found.latest:
        # Collecting all names reads all logs again, so it is done only for this error.
        known = sorted(found.every_name())
        unknown = [key for key in keys if key not in known]
        if known and unknown:
            from distflow.documents.text import did_you_mean

            raise NotFound(f"{record.id} has no metric {unknown[0]!r}", hint=did_you_mean(unknown[0], known, what="metrics"))
    return found


def write_tensorboard(folder: Path, metrics: Iterable[Metric]) -> int:
    """Write the numeric metrics below ``folder``, as one run for each task and rank.

    Args:
        folder: The directory to create.
        metrics: The metrics. Those of one task must be consecutive.

    Returns:
        The number of values written.

    Raises:
        InputError: if tensorboard is not installed, if ``folder`` exists (its curves would be drawn twice), or if it cannot be
            written.

    """
    try:
        summary = importlib.import_module("tensorboard.summary")
    except ImportError as error:
        raise InputError(
            f"TensorBoard files need a package that cannot be imported: {error}", hint="install it: pip install tensorboard"
        ) from None
    if folder.exists():
        raise InputError(f"{folder} exists already", hint="remove it, or use another directory")
    runs: dict[str, Any] = {}
    task, count = None, 0
    try:
        folder.mkdir(parents=True)
        for metric in metrics:
            if metric.task != task:
                # Close the runs of the previous task, because each run uses a thread and an open file.
                _close(runs)
                task = metric.task
            run = metric.task if metric.rank is None else f"{metric.task}-rank-{metric.rank}"
            for name, value in metric.values.items():
                if (scalar := number(value)) is None:
                    continue
                if run not in runs:
                    runs[run] = summary.Writer(summary.DirectoryOutput(str(folder / run)))
                runs[run].add_scalar(name, scalar, metric.step, wall_time=metric.time)
                count += 1
    except OSError as error:
        raise InputError(f"{folder} cannot be written: {error.strerror or error}") from error
    finally:
        _close(runs)
    return count


def _close(runs: dict[str, Any]) -> None:
    while runs:
        runs.popitem()[1].close()
