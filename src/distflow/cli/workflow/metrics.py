"""``distflow workflow metrics``."""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Collection, Iterable, Iterator, Sequence
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from distflow.cli.context import WorkflowArgument, open_workflow
from distflow.cli.options import command_app
from distflow.cli.render.metrics import PACE, PACE_OF_ALL, metrics_table, pace_words, plot
from distflow.cli.render.tables import terminal_width
from distflow.client.metrics import Latest, Metric, find_metrics, number
from distflow.client.workflows import choose_tasks
from distflow.documents.quantities import iso
from distflow.documents.text import plain
from distflow.errors import InputError
from distflow.state.record import WorkflowRecord

__all__ = ["app"]

app = command_app()

_PLOT_WIDTH = 80
_MOST_POINTS = 4096


class _Format(str, Enum):
    """The format of metrics on standard output."""

    TEXT = "text"
    JSON = "json"
    CSV = "csv"


@app.command(
    epilog="Examples: distflow workflow metrics pytorch-dist-3 --plot  ·  distflow workflow metrics pytorch-dist-3 -t csv"
)
def metrics(
    workflow: WorkflowArgument,
    task: Annotated[list[str] | None, typer.Option("--task", help="Only of this task; may be repeated.")] = None,
    rank: Annotated[int | None, typer.Option("--rank", min=0, help="Only what this rank said.")] = None,
    key: Annotated[
        list[str] | None, typer.Option("--key", "-k", metavar="NAME", help="Only this metric, such as loss; may be repeated.")
    ] = None,
    attempt: Annotated[
        int | None, typer.Option("--retry-id", "-r", min=0, help="Only of this attempt, counted from 0; default: all.")
    ] = None,
    plotted: Annotated[bool, typer.Option("--plot", help="Draw the metric by step: --key, else loss, else the first.")] = False,
    tensorboard: Annotated[
        Path | None,
        typer.Option("--tensorboard", metavar="DIR", help="Write them to this new directory, for TensorBoard.", dir_okay=True),
    ] = None,
    format_type: Annotated[
        _Format,
        typer.Option("--format-type", "-t", help="text: the latest values by task and rank; json and csv: every line."),
    ] = _Format.TEXT,
) -> None:
    """Show the metrics that tasks print as lines of JSON, such as {"step": 3, "loss": 0.5, "rank": 0}."""
    if sum((plotted, tensorboard is not None, format_type is not _Format.TEXT)) > 1:
        raise InputError("--plot, --tensorboard and --format-type exclude each other")
    with open_workflow(workflow) as (client, record):
        tasks = choose_tasks(record, task or [])
        found = find_metrics(client, record, tasks, rank=rank, keys=key or (), attempt=attempt)
        newest = found.latest
        if not newest:
            print(f'{record.id} has printed no metrics: lines such as {{"step": 1, "loss": 0.5}}', file=sys.stderr)
        if tensorboard is not None:
            count = found.write_tensorboard(tensorboard)
            print(f"{count:,} value{'' if count == 1 else 's'} written to {tensorboard}: tensorboard --logdir {tensorboard}")
        elif format_type is _Format.JSON:
            _write_json(record.id, found)
        elif format_type is _Format.CSV:
            _write_csv(found.names, found)
        elif newest and plotted:
            _draw(key or _to_draw(newest), found)
        elif newest:
            columns = [name for name in found.names if name in (key or ()) or name not in PACE_OF_ALL]
            print(metrics_table(newest, columns, width=terminal_width(sys.stdout)), end="")
            for words in _paces(record, newest):
                print(words)


def _write_json(workflow: str, metrics: Iterable[Metric]) -> None:
    write = sys.stdout.write
    write(f'{{\n  "name": {json.dumps(workflow)},\n  "metrics": [')
    between, end = "\n    ", "]\n}\n"
    for one in metrics:
        value = {
            "task": one.task, "retry_id": one.attempt, "rank": one.rank, "step": one.step, "time": iso(one.time),
            "values": dict(one.values),
        }  # fmt: skip
        write(f"{between}{json.dumps(value)}")
        between, end = ",\n    ", "\n  ]\n}\n"
    write(end)


def _write_csv(names: Collection[str], metrics: Iterable[Metric]) -> None:
    rows = csv.writer(sys.stdout, lineterminator="\n")
    rows.writerow(["task", "retry_id", "rank", "step", "time", *names])
    for one in metrics:
        position = ["" if one.rank is None else one.rank, one.step, iso(one.time) or ""]
        rows.writerow([one.task, one.attempt, *position, *(one.values.get(name, "") for name in names)])


def _to_draw(newest: Sequence[Latest]) -> list[str]:
    """Return the name of the metric to plot if no ``--key`` is given."""
    drawable = [name for one in newest for name, value in one.values.items() if number(value) is not None]
    other = [name for name in drawable if name not in PACE] or drawable
    return ["loss"] if "loss" in drawable else other[:1]


def _draw(keys: Sequence[str], metrics: Iterable[Metric]) -> None:
    series: dict[str, dict[str, dict[int, float]]] = {key: {} for key in keys}
    for metric in metrics:
        who = metric.task if metric.rank is None else f"{metric.task} rank {metric.rank}"
        for key in keys:
            if (value := number(metric.values.get(key))) is not None:
                points = series[key].setdefault(who, {})
                points[metric.step] = value  # after a restart, the same step can appear again and replaces the earlier value
                if len(points) > 2 * _MOST_POINTS:
                    series[key][who] = dict(list(points.items())[::2])
    width = terminal_width(sys.stdout) or _PLOT_WIDTH
    for key, found in series.items():
        if found:
            print(plot(plain(key), {who: sorted(points.items()) for who, points in found.items()}, width=width), end="")
        else:
            print(f"{plain(key)} has no numbers to draw", file=sys.stderr)


def _paces(record: WorkflowRecord, newest: Sequence[Latest]) -> Iterator[str]:
    groups = {task.name: group for group in record.groups for task in group.tasks}
    for one in newest:
        if words := pace_words(groups[one.task], one.values):
            yield f"{one.task}: {words}"
