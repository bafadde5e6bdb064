"""``distflow workflow metrics``."""

from __future__ import annotations

import csv
import fnmatch
import json
import sys
from collections.abc import Collection, Iterable, Iterator, Sequence
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from distflow.cli.completion import complete_metric
from distflow.cli.context import WorkflowArgument, open_workflow
from distflow.cli.options import TasksOption, command_app
from distflow.cli.render.metrics import PACE, PACE_OF_ALL, metrics_table, natural_key, pace_words, samples_table
from distflow.cli.render.plots import plot
from distflow.cli.render.tables import Paint, terminal_width
from distflow.cli.workflow.records import AllAttemptsOption
from distflow.client.measurements.metrics import Latest, Metric, MetricSeries, find_metrics, number
from distflow.client.measurements.samples import ResourceSamples, find_samples
from distflow.client.workflows import choose_tasks
from distflow.documents.json_keys import name_keys
from distflow.documents.quantities import count_text, iso, times
from distflow.documents.text import plain
from distflow.errors import InputError
from distflow.state.record import WorkflowRecord

__all__ = ["app"]

app = command_app()

_PLOT_WIDTH = 80
_MOST_POINTS = 4096
_SYSTEM = "system/"
"""The prefix of the names of resource samples."""


class _Format(str, Enum):
    """The format of metrics on standard output."""

    TEXT = "text"
    JSON = "json"
    CSV = "csv"


@app.command(
    epilog="Examples: distflow workflow metrics pytorch-dist-3 --plot  ·  "
    "distflow workflow metrics pytorch-dist-3 --plot -k 'system/gpu*/utilization'"
)
def metrics(
    workflow: WorkflowArgument,
    task: TasksOption = None,
    rank: Annotated[int | None, typer.Option("--rank", min=0, help="Only this rank.")] = None,
    key: Annotated[
        list[str] | None,
        typer.Option(
            "--key",
            "-k",
            metavar="NAME",
            help="Only this metric, such as loss; names of system metrics may contain *: 'system/gpu*/power'. May be repeated.",
            autocompletion=complete_metric,
        ),
    ] = None,
    attempt: AllAttemptsOption = None,
    system: Annotated[
        bool, typer.Option("--system", help="Show the use of CPU, memory, disk, network and GPUs, which nodes record.")
    ] = False,
    plotted: Annotated[
        bool,
        typer.Option(
            "--plot", help="Plot the metrics of --key. Default: loss, or else one other metric; with --system, GPU or CPU use."
        ),
    ] = False,
    is_log: Annotated[bool, typer.Option("--log", help="With --plot, use a logarithmic vertical axis.")] = False,
    tensorboard: Annotated[
        Path | None,
        typer.Option(
            "--tensorboard", metavar="DIR", help="Write the metrics to this new directory for TensorBoard.", dir_okay=True
        ),
    ] = None,
    wandb: Annotated[
        str | None,
        typer.Option("--wandb", metavar="[ENTITY/]PROJECT", help="Write the metrics to this project of Weights & Biases."),
    ] = None,
    mlflow: Annotated[
        str | None, typer.Option("--mlflow", metavar="EXPERIMENT", help="Write the metrics to this experiment of MLflow.")
    ] = None,
    format_type: Annotated[
        _Format,
        typer.Option("--format-type", "-t", help="Print the latest values by task and rank (text), or all values (json, csv)."),
    ] = _Format.TEXT,
) -> None:
    """Show the metrics that tasks print or, with --system, their use of resources.

    A task prints metrics as lines of JSON, such as {"step": 3, "loss": 0.5, "rank": 0}.
    """
    targets = {"--tensorboard": tensorboard, "--wandb": wandb, "--mlflow": mlflow}
    if sum((plotted, *(one is not None for one in targets.values()), format_type is not _Format.TEXT)) > 1:
        raise InputError("--plot, --tensorboard, --wandb, --mlflow and --format-type cannot be combined")
    if is_log and not plotted:
        raise InputError("--log needs --plot")
    target = next(((option, value) for option, value in targets.items() if value is not None), None)
    printed = [one for one in key or () if not one.startswith(_SYSTEM)]
    recorded = [one for one in key or () if one.startswith(_SYSTEM)] or ([f"{_SYSTEM}*"] if system else [])
    # JSON documents and exports contain everything, unless some metrics were chosen.
    is_whole = not key and not system and (format_type is _Format.JSON or target is not None)
    with open_workflow(workflow) as (client, record):
        found: MetricSeries | None = None
        if printed or not recorded:
            tasks = choose_tasks(record, task or [])
            found = find_metrics(client, record, tasks, rank=rank, keys=printed, attempt=attempt)
        samples: list[ChosenSamples] = []
        if recorded or is_whole:
            tasks = choose_tasks(record, task or [], () if rank is None else (rank,))
            samples = _choose(find_samples(client, record, tasks, attempt=attempt), recorded or [f"{_SYSTEM}*"])
        chosen = "" if not task and rank is None and attempt is None else " for the chosen task, rank or attempt"
        if found is not None and not found.latest:
            example = '. Tasks print them as lines such as {"step": 1, "loss": 0.5}'
            missing = f"values of {' or '.join(map(plain, printed))}{chosen}" if printed else f"metrics{chosen}{example}"
            print(f"{record.id} has no {missing}", file=sys.stderr)
        if recorded and not samples:
            print(f"{record.id} has no samples of {' or '.join(map(plain, recorded))}{chosen}", file=sys.stderr)
        if target is not None:
            _export(*target, record.id, found or (), samples)
        elif format_type is _Format.JSON:
            _write_json(record.id, found or (), samples)
        elif format_type is _Format.CSV:
            _write_csv(found, samples)
        elif plotted:
            _draw(printed or (_to_draw(found.latest) if found is not None else []), found or (), is_log)
            _draw_samples(recorded if key else _samples_to_draw(samples), samples, is_log)
        else:
            _print_tables(record, found, printed, samples)


ChosenSamples = tuple[ResourceSamples, Sequence[str]]
"""Resource samples with the names of their series to show."""


def _choose(samples: Iterable[ResourceSamples], patterns: Collection[str]) -> list[ChosenSamples]:
    """Return the samples that have series whose names match one of the patterns."""
    found: list[ChosenSamples] = []
    for one in samples:
        names = [name for name in one.series if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)]
        if names:
            found.append((one, sorted(names, key=natural_key)))
    return found


def _print_tables(
    record: WorkflowRecord, found: MetricSeries | None, printed: Collection[str], samples: Sequence[ChosenSamples]
) -> None:
    if found is not None and found.latest:
        columns = [name for name in found.names if name in printed or name not in PACE_OF_ALL]
        print(metrics_table(found.latest, columns, width=terminal_width(sys.stdout)), end="")
        for words in _paces(record, found.latest):
            print(words)
    if samples:
        print(samples_table(samples), end="")


def _export(
    option: str, target: str | Path, workflow: str, metrics: Iterable[Metric], samples: Sequence[ChosenSamples]
) -> None:
    from distflow.client.measurements import exports

    if option == "--tensorboard":
        count = exports.write_tensorboard(Path(target), metrics, samples)
        print(f"{count_text(count, 'value')} written to {target}. View: tensorboard --logdir {target}")
        return
    write, what = (exports.write_wandb, "project") if option == "--wandb" else (exports.write_mlflow, "MLflow experiment")
    count = write(str(target), workflow, metrics, samples)
    print(f"{count_text(count, 'value')} written to the {what} {target}")


def _write_json(workflow: str, metrics: Iterable[Metric], samples: Sequence[ChosenSamples]) -> None:
    write = sys.stdout.write
    write(f'{{\n  "name": {json.dumps(workflow)},\n  "workflow_id": {json.dumps(workflow)},\n  "metrics": [')
    between, end = "\n    ", "]"
    for one in metrics:
        value = {
            **name_keys(task=one.task), "retry_id": one.attempt, "rank": one.rank, "step": one.step, **times(time=one.time),
            "values": dict(one.values),
        }  # fmt: skip
        write(f"{between}{json.dumps(value)}")
        between, end = ",\n    ", "\n  ]"
    write(f'{end},\n  "system": [')
    between, end = "\n    ", "]\n}\n"
    for found, names in samples:
        document: dict[str, object] = {
            **name_keys(task=found.task), "retry_id": found.attempt, "times": [iso(at) for at in found.times],
            "series": {name: found.series[name] for name in names}, "limits": dict(found.limits),
        }  # fmt: skip
        write(f"{between}{json.dumps(document)}")
        between, end = ",\n    ", "\n  ]\n}\n"
    write(end)


def _write_csv(metrics: MetricSeries | None, samples: Sequence[ChosenSamples]) -> None:
    rows = csv.writer(sys.stdout, lineterminator="\n")
    if metrics is not None and samples:
        raise InputError(
            "one CSV table cannot contain both metrics and samples of resources",
            hint="run the command twice: with only metrics in `--key`, and with only `--system` or `--key system/…`",
        )
    if metrics is not None:
        rows.writerow(["task", "retry_id", "rank", "step", "time", *metrics.names])
        for one in metrics:
            position = ["" if one.rank is None else one.rank, one.step, iso(one.time) or ""]
            rows.writerow([one.task, one.attempt, *position, *(one.values.get(name, "") for name in metrics.names)])
        return
    names = sorted({name for _, chosen in samples for name in chosen}, key=natural_key)
    rows.writerow(["task", "retry_id", "time", *names])
    for found, _ in samples:
        unknown = [None] * len(found.times)
        for at, *values in zip(found.times, *(found.series.get(name, unknown) for name in names), strict=True):
            rows.writerow([found.task, found.attempt, iso(at), *("" if value is None else value for value in values)])


def _to_draw(newest: Sequence[Latest]) -> list[str]:
    """Return the metric to plot without ``--key``, or an empty list if no metric has a number."""
    drawable = [name for one in newest for name, value in one.values.items() if number(value) is not None]
    other = [name for name in drawable if name not in PACE] or drawable
    return ["loss"] if "loss" in drawable else other[:1]


def _draw(keys: Sequence[str], metrics: Iterable[Metric], is_log: bool) -> None:
    series: dict[str, dict[str, dict[int, float]]] = {key: {} for key in keys}
    for metric in metrics if keys else ():
        who = metric.task if metric.rank is None else f"{metric.task} rank {metric.rank}"
        for key in keys:
            if (value := number(metric.values.get(key))) is not None:
                points = series[key].setdefault(who, {})
                points[metric.step] = value  # after a restart, the same step can appear again and replaces the earlier value
                if len(points) > 2 * _MOST_POINTS:
                    series[key][who] = dict(list(points.items())[::2])
    for key, found in series.items():
        _print_plot(key, {who: sorted(points.items()) for who, points in found.items()}, "step", is_log)


def _samples_to_draw(samples: Sequence[ChosenSamples]) -> list[str]:
    has_gpus = any(name.endswith("/utilization") for _, names in samples for name in names)
    return [f"{_SYSTEM}gpu*/utilization" if has_gpus else f"{_SYSTEM}cpu/usage"] if samples else []


def _draw_samples(patterns: Sequence[str], samples: Sequence[ChosenSamples], is_log: bool) -> None:
    begin = min((one.times[0] for one, _ in samples), default=0.0)
    for pattern in patterns if samples else ():
        found: dict[str, list[tuple[float, float]]] = {}
        for one, names in samples:
            for name in fnmatch.filter(names, pattern):
                fixed_end = pattern.rpartition("*")[2] if "*" in pattern else name
                matched = name.removesuffix(fixed_end).removeprefix(_SYSTEM)
                who = " ".join(filter(None, [one.task, f"retry-{one.attempt}" if one.attempt else "", matched]))
                values = zip(one.times, one.series[name], strict=True)
                found[who] = [(at - begin, value) for at, value in values if value is not None]
        _print_plot(pattern, found, "seconds", is_log)


def _print_plot(title: str, series: dict[str, list[tuple[float, float]]], axis: str, is_log: bool) -> None:
    if not any(series.values()):
        print(f"{plain(title)} has no numbers to plot", file=sys.stderr)
        return
    width = terminal_width(sys.stdout) or _PLOT_WIDTH
    has_colors = Paint.of(sys.stdout).enabled
    print(plot(title, series, axis=axis, width=width, is_log=is_log, has_colors=has_colors), end="")


def _paces(record: WorkflowRecord, newest: Sequence[Latest]) -> Iterator[str]:
    groups = {task.name: group for group in record.groups for task in group.tasks}
    for one in newest:
        if words := pace_words(groups[one.task], one.values):
            yield f"{one.task}: {words}"
