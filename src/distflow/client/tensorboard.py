"""Write metrics as TensorBoard event files. This needs the tensorboard package, but not torch."""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from distflow.errors import InputError
from distflow.state.metrics import Metric, number

__all__ = ["write_tensorboard"]


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
            f"--tensorboard needs a package that cannot be imported: {error}", hint="install it: pip install tensorboard"
        ) from None
    if folder.exists():
        raise InputError(f"{folder} is there already", hint="remove it, or give --tensorboard another directory")
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
