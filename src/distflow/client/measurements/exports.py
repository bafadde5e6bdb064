"""Write metrics and resource samples for TensorBoard, Weights & Biases and MLflow, each with its own Python package.

Each task has a run for each rank that printed metrics (``master-rank-0``), and a run for metrics without a rank (``master``).
The resource samples of a task are a run, too (``master-system``), whose steps are seconds.
"""

from __future__ import annotations

import importlib
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from distflow.errors import InputError
from distflow.state.metrics import Metric, number
from distflow.state.samples import ResourceSamples

__all__ = ["ChosenSamples", "write_mlflow", "write_tensorboard", "write_wandb"]

ChosenSamples = Iterable[tuple[ResourceSamples, Collection[str]]]
"""Resource samples with the names of their series to write."""

_MLFLOW_BATCH = 1000
"""The largest number of metrics in one request. Source: https://mlflow.org/docs/latest/rest-api.html#request-limits."""
_MLFLOW_FORBIDDEN = re.compile(r"[^\w\-. :/]")


class _Run(Protocol):
    """A run that is being written."""

    def add(self, values: Mapping[str, float], step: int, time: float | None) -> None:
        """Write the values of one step; ``time`` is in seconds since the epoch."""

    def close(self) -> None:
        """Complete the run."""


def write_tensorboard(folder: Path, metrics: Iterable[Metric], samples: ChosenSamples = ()) -> int:
    """Write one TensorBoard run for each task and rank below ``folder``.

    Args:
        folder: The directory to create.
        metrics: The metrics. Those of one task must be consecutive.
        samples: The resource samples to write.

    Returns:
        The number of values written.

    Raises:
        InputError: if tensorboard is not installed, if ``folder`` exists (TensorBoard would draw the old and the new curves
            together), or if it cannot be written.

    """
    summary = _package("tensorboard.summary", "tensorboard", "TensorBoard files")
    if os.path.exists(folder):
        raise InputError(f"`{folder}` exists already", hint="remove it, or use another directory")
    try:
        folder.mkdir(parents=True)
        return _write(lambda name: _TensorBoardRun(summary, folder / name), metrics, samples)
    except OSError as error:
        hint = "free some space, or use another directory"
        raise InputError(f"`{folder}` cannot be written: {error.strerror or error}", hint=hint) from error


def write_wandb(project: str, workflow: str, metrics: Iterable[Metric], samples: ChosenSamples = ()) -> int:
    """Create one run of Weights & Biases for each task and rank, in the group ``workflow`` of the project.

    wandb's environment variables apply, such as ``WANDB_API_KEY`` and ``WANDB_MODE=offline``.

    Args:
        project: ``PROJECT`` or ``ENTITY/PROJECT``.
        workflow: The id of the workflow.
        metrics: The metrics. Those of one task must be consecutive.
        samples: The resource samples to write.

    Returns:
        The number of values written.

    Raises:
        InputError: if wandb is not installed, or if it cannot create or write a run.

    """
    wandb = _package("wandb", "wandb", "runs of Weights & Biases")
    entity, _, short = project.rpartition("/")
    settings = wandb.Settings(console="off", silent=True, x_disable_stats=True, disable_git=True, disable_code=True)

    def begin(name: str) -> _Run:
        labels = {"entity": entity or None, "project": short, "group": workflow, "name": f"{workflow} {name}"}
        return _WandbRun(wandb.init(**labels, settings=settings, reinit="create_new"))

    try:
        return _write(begin, metrics, samples)
    except wandb.Error as error:
        raise InputError(
            f"wandb cannot write the runs: {error}",
            hint="log in with `wandb login`, check the name of the project, or set WANDB_MODE=offline",
        ) from error
    except OSError as error:
        raise InputError(
            f"wandb cannot write the runs: {error}", hint="free some disk space, or set WANDB_DIR to another directory"
        ) from error


def write_mlflow(experiment: str, workflow: str, metrics: Iterable[Metric], samples: ChosenSamples = ()) -> int:
    """Create one MLflow run for each task and rank in an experiment, which is created if it does not exist.

    ``experiment`` is the name of the experiment. The other arguments, the result and the errors are those of ``write_wandb``,
    with ``mlflow`` instead of ``wandb``. ``MLFLOW_TRACKING_URI`` names the server or the directory.
    """
    mlflow = _package("mlflow", "mlflow-skinny", "MLflow runs")
    try:
        client = mlflow.MlflowClient()
        known = client.get_experiment_by_name(experiment)
        target = known.experiment_id if known is not None else client.create_experiment(experiment)
        return _write(
            lambda run: _MlflowRun(
                mlflow,
                client,
                client.create_run(target, run_name=f"{workflow} {run}", tags={"distflow.workflow": workflow}).info.run_id,
            ),
            metrics,
            samples,
        )
    except mlflow.exceptions.MlflowException as error:
        raise InputError(f"MLflow cannot write the runs: {error}", hint="check MLFLOW_TRACKING_URI") from error
    except OSError as error:
        hint = "free some space, or name another directory or server with MLFLOW_TRACKING_URI"
        raise InputError(f"MLflow cannot write the runs: {error}", hint=hint) from error


def _package(module: str, package: str, what: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        hint = f"install it: pip install {package}"
        raise InputError(f"{what} need a package that cannot be imported: {error}", hint=hint) from None


def _write(begin: Callable[[str], _Run], metrics: Iterable[Metric], samples: ChosenSamples) -> int:
    """Write all rows (see ``_rows``), and return the number of values.

    All runs of an owner are closed before the next owner begins, because each open run uses a thread or a file.
    """
    runs: dict[str, _Run] = {}
    current, count = None, 0
    try:
        for owner, name, values, step, time in _rows(metrics, samples):
            if owner != current:
                _close(runs)
                current = owner
            if name not in runs:
                runs[name] = begin(name)
            runs[name].add(values, step, time)
            count += len(values)
    finally:
        _close(runs)
    return count


def _rows(
    metrics: Iterable[Metric], samples: ChosenSamples
) -> Iterator[tuple[str, str, Mapping[str, float], int, float | None]]:
    """Yield rows: the owner (the metrics or the samples of a task), the run's name, the values, the step and the time.

    All rows of an owner are consecutive.
    """
    for metric in metrics:
        run = metric.task if metric.rank is None else f"{metric.task}-rank-{metric.rank}"
        if values := {name: found for name, value in metric.values.items() if (found := number(value)) is not None}:
            yield metric.task, run, values, metric.step, metric.time
    begins: dict[str, float] = {}
    for one, names in samples:
        begin = begins.setdefault(one.task, one.times[0])
        for position, at in enumerate(one.times):
            known = {name: value for name in names if (value := one.series[name][position]) is not None}
            if known:
                yield f"{one.task}/system", f"{one.task}-system", known, round(at - begin), at


def _close(runs: dict[str, _Run]) -> None:
    while runs:
        runs.popitem()[1].close()


class _TensorBoardRun:
    def __init__(self, summary: Any, folder: Path) -> None:
        self._writer = summary.Writer(summary.DirectoryOutput(str(folder)))

    def add(self, values: Mapping[str, float], step: int, time: float | None) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step, wall_time=time)

    def close(self) -> None:
        self._writer.close()


class _WandbRun:
    """A run with ``step`` as its horizontal axis: W&B's own step cannot decrease, but steps do after a restart."""

    def __init__(self, run: Any) -> None:
        self._run = run
        run.define_metric("step", hidden=True)
        run.define_metric("*", step_metric="step")

    def add(self, values: Mapping[str, float], step: int, time: float | None) -> None:
        self._run.log({**values, "step": step, **({} if time is None else {"_timestamp": time})})

    def close(self) -> None:
        self._run.finish()


class _MlflowRun:
    def __init__(self, mlflow: Any, client: Any, run: str) -> None:
        self._metric = mlflow.entities.Metric
        self._client = client
        self._run = run
        self._waiting: list[Any] = []

    def add(self, values: Mapping[str, float], step: int, time: float | None) -> None:
        for name, value in values.items():
            self._waiting.append(self._metric(_MLFLOW_FORBIDDEN.sub("_", name), value, round((time or 0) * 1000), step))
        while len(self._waiting) >= _MLFLOW_BATCH:
            self._send()

    def close(self) -> None:
        while self._waiting:
            self._send()
        self._client.set_terminated(self._run)

    def _send(self) -> None:
        batch, self._waiting = self._waiting[:_MLFLOW_BATCH], self._waiting[_MLFLOW_BATCH:]
        self._client.log_batch(self._run, metrics=batch)
