"""Print stored data of a workflow: ``distflow workflow logs``, ``events`` and ``spec``."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from typing import Annotated

import typer

from distflow.cli.context import WorkflowArgument, open_workflow
from distflow.cli.options import Format, OsmoTasksOption, command_app
from distflow.cli.render.live import Prefixes
from distflow.cli.render.tables import Paint
from distflow.cli.render.workflow_json import event_json, workflow_key
from distflow.cli.render.workflow_text import event_line
from distflow.client.logs import LogLine, stream_logs
from distflow.client.workflows import choose_tasks, pause, read_events, read_spec
from distflow.documents.json_keys import name_keys
from distflow.documents.quantities import local_second, times
from distflow.documents.text import plain_lines
from distflow.errors import InputError
from distflow.state.record import EventRecord, WorkflowRecord

__all__ = ["AllAttemptsOption", "events_app", "events_document", "log_line_json", "logs_app", "spec_app"]


AllAttemptsOption = Annotated[
    int | None,
    typer.Option("--retry-id", "-r", min=0, help="Only this attempt, counted from 0. Default: all.", show_default=False),
]
"""``AttemptOption`` with all attempts as the default."""

logs_app = command_app()


@logs_app.command(
    epilog="Examples: distflow workflow logs -f pytorch-dist-3  ·  distflow workflow logs pytorch-dist-3 --rank 11 -n 50"
)
def logs(
    workflow: WorkflowArgument,
    task: OsmoTasksOption = None,
    rank: Annotated[list[int] | None, typer.Option("--rank", min=0, help="Only this rank; may be repeated.")] = None,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Follow the logs until the workflow has ended and they are complete.")
    ] = False,
    last: Annotated[
        int | None, typer.Option("-n", min=0, metavar="LINES", help="Print only the last LINES lines, and those that follow.")
    ] = None,
    attempt: AllAttemptsOption = None,
    error: Annotated[
        bool, typer.Option("--error", help="Print the error file (torch's format) of one --task or --rank instead of output.")
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
    if error and (follow or last is not None or len(task or ()) + len(rank or ()) != 1):
        raise InputError(
            "--error prints the error file of one task", hint="use it with one --task or --rank, and without --follow and -n"
        )
    with open_workflow(workflow) as (client, record):
        tasks = choose_tasks(record, task or [], rank or [])
        if attempt is not None and not follow:
            from distflow.client.failures import check_attempt

            check_attempt(record, attempt)
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
        value = log_line_json(line)
        if follow:
            write(f"{json.dumps(value)}\n")
        else:
            write(f"{between}{json.dumps(value)}")
            between = ",\n  "
    if not follow:
        write("[]\n" if between.startswith("[") else "\n]\n")


def log_line_json(line: LogLine) -> dict[str, object]:
    """Return a line of output for ``logs --format-type json``."""
    return {
        **times(time=line.time), **name_keys(task=line.task), "rank": line.rank, "retry_id": line.attempt, "text": line.text
    }  # fmt: skip


events_app = command_app()


@events_app.command(
    epilog="Examples: distflow workflow events pytorch-dist-3  ·  distflow workflow events pytorch-dist-3 -t worker"
)
def events(
    workflow: WorkflowArgument,
    task: OsmoTasksOption = None,
    attempt: AllAttemptsOption = None,
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
            print(json.dumps(events_document(record, wanted), indent=2))
            return
        for event in wanted:
            print(json.dumps(event_json(event)) if format_type is Format.JSON else event_line(event), flush=follow)


def events_document(record: WorkflowRecord, events: Iterable[EventRecord]) -> dict[str, object]:
    """Return the JSON document of ``events``."""
    return {**workflow_key(record), "events": [event_json(event) for event in events]}


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
