"""``distflow workflow events``."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from distflow.cli.context import WorkflowArgument, open_workflow
from distflow.cli.options import Format, command_app
from distflow.cli.render.workflow_json import event_json
from distflow.cli.render.workflow_text import event_line
from distflow.client.workflows import choose_tasks, read_events

__all__ = ["app"]

app = command_app()


@app.command(epilog="Examples: distflow workflow events pytorch-dist-3  ·  distflow workflow events pytorch-dist-3 -t worker")
def events(
    workflow: WorkflowArgument,
    task: Annotated[list[str] | None, typer.Option("--task", "-t", help="Only of this task; may be repeated.")] = None,
    retry_id: Annotated[
        int | None,
        typer.Option("--retry-id", "-r", min=0, help="Only of this attempt, counted from 0.", show_default=False),
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the workflow has ended.")] = False,
    format_type: Annotated[
        Format, typer.Option("--format-type", help="text, or json: one document; with --follow one per line.")
    ] = Format.TEXT,
) -> None:
    """Tell a workflow's story: what was decided and what happened, in order."""
    with open_workflow(workflow) as (client, record):
        names = {one.name for _, one in choose_tasks(record, task or [])} if task else None
        wanted = read_events(client, record, tasks=names, attempt=retry_id, follow=follow)
        if format_type is Format.JSON and not follow:
            print(json.dumps({"events": [event_json(event) for event in wanted]}, indent=2))
            return
        for event in wanted:
            print(json.dumps(event_json(event)) if format_type is Format.JSON else event_line(event), flush=follow)
