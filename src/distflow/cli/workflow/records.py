"""Print what is stored of a workflow: ``distflow workflow logs``, ``events``, ``metrics`` and ``spec``."""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Collection, Iterable, Iterator, Sequence
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from distflow.cli.completion import complete_metric
from distflow.cli.context import WorkflowArgument, open_workflow
from distflow.cli.options import Format, OsmoTasksOption, TasksOption, command_app
from distflow.cli.render.live import Prefixes
from distflow.cli.render.metrics import PACE, PACE_OF_ALL, metrics_table, pace_words, plot
from distflow.cli.render.tables import Paint, terminal_width
from distflow.cli.render.workflow_json import event_json, workflow_key
from distflow.cli.render.workflow_text import event_line
from distflow.client.logs import LogLine, stream_logs
from distflow.client.measurements.metrics import Latest, Metric, find_metrics, number
from distflow.client.workflows import choose_tasks, pause, read_events, read_spec
from distflow.documents.json_keys import name_keys
from distflow.documents.quantities import count_text, iso, local_second, times
from distflow.documents.text import plain, plain_lines
from distflow.errors import InputError
from distflow.state.record import WorkflowRecord

__all__ = ["events_app", "logs_app", "metrics_app", "spec_app"]


_AttemptOption = Annotated[
    int | None,
    typer.Option("--retry-id", "-r", min=0, help="Only of this attempt, counted from 0. Default: all.", show_default=False),
]

logs_app = command_app()


@logs_app.command(
    epilog="Examples: distflow workflow logs -f pytorch-dist-3  ·  distflow workflow logs pytorch-dist-3 --rank 11 -n 50"
)
def logs(
    workflow: WorkflowArgument,
    task: OsmoTasksOption = None,
    rank: Annotated[list[int] | None, typer.Option("--rank", min=0, help="Only of this rank; may be repeated.")] = None,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Follow the logs until the workflow has ended and they are complete.")
    ] = False,
    last: Annotated[
        int | None, typer.Option("-n", min=0, metavar="LINES", help="Start with only this number of last lines.")
    ] = None,
    attempt: _AttemptOption = None,
    error: Annotated[
        bool, typer.Option("--error", help="Print the error file of the task in --task (torch's format) instead of its output.")
    ] = False,
    prefix: Annotated[bool, typer.Option("--prefix/--no-prefix", help="Begin each line with its [task].")] = True,
    timestamps: Annotated[bool, typer.Option("--timestamps", help="Begin each line with its local time.")] = False,
    format_type: Annotated[
        Format, typer.Option("--format-type", help="Print text, or JSON: one array, or with --follow one object per line.")
    ] = Format.TEXT,
) -> None:
    """Print or follow the output of tasks, merged by time.

    Logs are copied to this machine, so they are available after the nodes are gone.
    """
    if error and (follow or last is not None or len(task or rank or ()) != 1):
        raise InputError(
            "--error prints the error file of one task", hint="use it with one --task, and without --follow and -n"
        )
    with open_workflow(workflow) as (client, record):
        tasks = choose_tasks(record, task or [], rank or [])
        if error:
            from distflow.cli.render.live import show_errors

            show_errors(record, tasks[0][0], tasks[0][1].name, attempt, as_json=format_type is Format.JSON)
            return
        lines = stream_logs(
            client,
            record,
            tasks,
            names=task or (),
            ranks=rank or (),
            attempt=attempt,
            last=last,
            follow=follow,
            wait=_flush_and_pause,
        )
        if format_type is Format.JSON:
            _write_log_json(lines, follow)
        else:
            prefixes = Prefixes([one for _, one in tasks], Paint.of(sys.stdout), enabled=prefix)
            for line in lines:
                stamp = f"{local_second(line.time)} " if timestamps else ""
                sys.stdout.write(f"{stamp}{prefixes.of(line)}{line.text}\n")
        sys.stdout.flush()
        for words in lines.remarks():
            print(words, file=sys.stderr)


def _flush_and_pause(seconds: float) -> None:
    sys.stdout.flush()
    pause(seconds)


def _write_log_json(lines: Iterable[LogLine], follow: bool) -> None:
    write = sys.stdout.write
    between = "[\n  "
    for line in lines:
        value = {
            **times(time=line.time),
            **name_keys(task=line.task),
            "rank": line.rank,
            "retry_id": line.attempt,
            "text": line.text,
        }
        if follow:
            write(f"{json.dumps(value)}\n")
        else:
            write(f"{between}{json.dumps(value)}")
            between = ",\n  "
    if not follow:
        write("[]\n" if between.startswith("[") else "\n]\n")


events_app = command_app()


@events_app.command(
    epilog="Examples: distflow workflow events pytorch-dist-3  ·  distflow workflow events pytorch-dist-3 -t worker"
)
def events(
    workflow: WorkflowArgument,
    task: OsmoTasksOption = None,
    attempt: _AttemptOption = None,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Wait for further events until the workflow has ended.")
    ] = False,
    format_type: Annotated[
        Format, typer.Option("--format-type", help="Print text, or JSON: one document, or with --follow one object per line.")
    ] = Format.TEXT,
) -> None:
    """List the events of a workflow in order."""
    with open_workflow(workflow) as (client, record):
        names = {one.name for _, one in choose_tasks(record, task or [])} if task else None
        wanted = read_events(client, record, tasks=names, attempt=attempt, follow=follow)
        if format_type is Format.JSON and not follow:
            print(json.dumps({**workflow_key(record), "events": [event_json(event) for event in wanted]}, indent=2))
            return
        for event in wanted:
            print(json.dumps(event_json(event)) if format_type is Format.JSON else event_line(event), flush=follow)


metrics_app = command_app()

_PLOT_WIDTH = 80
_MOST_POINTS = 4096


class _Format(str, Enum):
    """The format of metrics on standard output."""

    TEXT = "text"
    JSON = "json"
    CSV = "csv"


@metrics_app.command(
    epilog="Examples: distflow workflow metrics pytorch-dist-3 --plot  ·  distflow workflow metrics pytorch-dist-3 -t csv"
)
def metrics(
    workflow: WorkflowArgument,
    task: TasksOption = None,
    rank: Annotated[int | None, typer.Option("--rank", min=0, help="Only of this rank.")] = None,
    key: Annotated[
        list[str] | None,
        typer.Option(
            "--key",
            "-k",
            metavar="NAME",
            help="Only this metric, such as loss; may be repeated.",
            autocompletion=complete_metric,
        ),
    ] = None,
    attempt: _AttemptOption = None,
    plotted: Annotated[
        bool, typer.Option("--plot", help="Plot a metric by step: that of --key, or else loss, or else the first one.")
    ] = False,
    tensorboard: Annotated[
        Path | None,
        typer.Option(
            "--tensorboard", metavar="DIR", help="Write the metrics to this new directory for TensorBoard.", dir_okay=True
        ),
    ] = None,
    format_type: Annotated[
        _Format,
        typer.Option("--format-type", "-t", help="Print the latest values by task and rank (text), or all values (json, csv)."),
    ] = _Format.TEXT,
) -> None:
    """Show the metrics that tasks print.

    A task prints metrics as lines of JSON, such as {"step": 3, "loss": 0.5, "rank": 0}.
    """
    if sum((plotted, tensorboard is not None, format_type is not _Format.TEXT)) > 1:
        raise InputError("--plot, --tensorboard and --format-type cannot be combined")
    with open_workflow(workflow) as (client, record):
        tasks = choose_tasks(record, task or [])
        found = find_metrics(client, record, tasks, rank=rank, keys=key or (), attempt=attempt)
        newest = found.latest
        if not newest:
            print(
                f'{record.id} has no metrics. Tasks print them as lines such as {{"step": 1, "loss": 0.5}}',
                file=sys.stderr,
            )
        if tensorboard is not None:
            count = found.write_tensorboard(tensorboard)
            print(f"{count_text(count, 'value')} written to {tensorboard}. View: tensorboard --logdir {tensorboard}")
        elif format_type is _Format.JSON:
            _write_metrics_json(record.id, found)
        elif format_type is _Format.CSV:
            _write_metrics_csv(found.names, found)
        elif newest and plotted:
            _draw(key or _to_draw(newest), found)
        elif newest:
            columns = [name for name in found.names if name in (key or ()) or name not in PACE_OF_ALL]
            print(metrics_table(newest, columns, width=terminal_width(sys.stdout)), end="")
            for words in _paces(record, newest):
                print(words)


def _write_metrics_json(workflow: str, metrics: Iterable[Metric]) -> None:
    write = sys.stdout.write
    write(f'{{\n  "name": {json.dumps(workflow)},\n  "workflow_id": {json.dumps(workflow)},\n  "metrics": [')
    between, end = "\n    ", "]\n}\n"
    for one in metrics:
        value = {
            **name_keys(task=one.task), "retry_id": one.attempt, "rank": one.rank, "step": one.step, **times(time=one.time),
            "values": dict(one.values),
        }  # fmt: skip
        write(f"{between}{json.dumps(value)}")
        between, end = ",\n    ", "\n  ]\n}\n"
    write(end)


def _write_metrics_csv(names: Collection[str], metrics: Iterable[Metric]) -> None:
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
            print(f"{plain(key)} has no numbers to plot", file=sys.stderr)


def _paces(record: WorkflowRecord, newest: Sequence[Latest]) -> Iterator[str]:
    groups = {task.name: group for group in record.groups for task in group.tasks}
    for one in newest:
        if words := pace_words(groups[one.task], one.values):
            yield f"{one.task}: {words}"


spec_app = command_app()


@spec_app.command(epilog="Example: distflow workflow spec pytorch-dist-3 --template > again.yaml")
def spec(
    workflow: WorkflowArgument,
    template: Annotated[
        bool, typer.Option("--template", help="Print the template as submitted, before values were filled in.")
    ] = False,
) -> None:
    """Print the spec of a workflow as it ran.

    Values of --set-env are never part of it.
    """
    with open_workflow(workflow, report_age=False) as (client, record):
        text = read_spec(client, record, template=template)
        text = text if text.endswith("\n") else f"{text}\n"
        # A node may have forged the spec of an adopted workflow. Escape control characters, which could hide lines.
        sys.stdout.write(plain_lines(text) if sys.stdout.isatty() else text)
