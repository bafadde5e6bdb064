"""``distflow workflow logs``."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from typing import Annotated

import typer

from distflow.cli.context import WorkflowArgument, open_workflow
from distflow.cli.options import Format, command_app
from distflow.cli.render.logs import Prefixes
from distflow.cli.render.tables import Paint
from distflow.client.logs import LogLine, stream_logs
from distflow.client.workflows import choose_tasks, pause
from distflow.documents.quantities import iso, local_second
from distflow.errors import InputError

__all__ = ["app"]

app = command_app()


@app.command(
    epilog="Examples: distflow workflow logs -f pytorch-dist-3  ·  distflow workflow logs pytorch-dist-3 --rank 11 -n 50"
)
def logs(
    workflow: WorkflowArgument,
    task: Annotated[list[str] | None, typer.Option("--task", "-t", help="Only of this task; may be repeated.")] = None,
    rank: Annotated[list[int] | None, typer.Option("--rank", min=0, help="Only of this rank; may be repeated.")] = None,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Go on until the workflow has ended and its logs are complete.")
    ] = False,
    last: Annotated[int | None, typer.Option("-n", min=0, metavar="LINES", help="Begin with the last lines only.")] = None,
    attempt: Annotated[
        int | None, typer.Option("--retry-id", "-r", min=0, help="Only of this attempt, counted from 0; default: all.")
    ] = None,
    error: Annotated[
        bool, typer.Option("--error", help="What one task wrote to its error file (torch's format) instead; with --task.")
    ] = False,
    prefix: Annotated[bool, typer.Option("--prefix/--no-prefix", help="Begin each line with its [task].")] = True,
    timestamps: Annotated[bool, typer.Option("--timestamps", help="Begin each line with its time, in your zone.")] = False,
    format_type: Annotated[
        Format, typer.Option("--format-type", help="text, or json: one array; with --follow one object per line.")
    ] = Format.TEXT,
) -> None:
    """Show what the tasks print, merged by time; also after the end, and when their nodes are gone."""
    if error and (follow or last is not None or len(task or rank or ()) != 1):
        raise InputError("--error shows one task's error file", hint="name the task with --task, without --follow and -n")
    with open_workflow(workflow) as (client, record):
        tasks = choose_tasks(record, task or [], rank or [])
        if error:
            from distflow.cli.render.logs import show_errors

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
            _write_json(lines, follow)
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


def _write_json(lines: Iterable[LogLine], follow: bool) -> None:
    write = sys.stdout.write
    between = "[\n  "
    for line in lines:
        value = {"time": iso(line.time), "task": line.task, "rank": line.rank, "retry_id": line.attempt, "text": line.text}
        if follow:
            write(f"{json.dumps(value)}\n")
        else:
            write(f"{between}{json.dumps(value)}")
            between = ",\n  "
    if not follow:
        write("[]\n" if between.startswith("[") else "\n]\n")
