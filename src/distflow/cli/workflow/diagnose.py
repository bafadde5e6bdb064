"""``distflow workflow diagnose``."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from distflow.cli.context import WorkflowArgument, open_workflow
from distflow.cli.options import Format, FormatOption, command_app
from distflow.cli.render.failures import diagnoses_json, diagnoses_text, no_verdict
from distflow.cli.render.tables import Paint
from distflow.client.failures import check_attempt, diagnose_groups
from distflow.client.workflows import choose_tasks

__all__ = ["app"]

app = command_app()


@app.command(
    epilog="Examples: distflow workflow diagnose pytorch-dist-3  ·  distflow workflow diagnose digits-3 --task worker -t json"
)
def diagnose(
    workflow: WorkflowArgument,
    task: Annotated[list[str] | None, typer.Option("--task", help="Only from what this task printed; may be repeated.")] = None,
    attempt: Annotated[
        int | None, typer.Option("--retry-id", "-r", min=0, help="Of this attempt, counted from 0; default: the last.")
    ] = None,
    format_type: FormatOption = Format.TEXT,
) -> None:
    """Tell what a failed or silent gang suffers from, and what to do: from its logs and its end, without asking the nodes."""
    with open_workflow(workflow) as (client, record):
        names = {one.name for _, one in choose_tasks(record, task)} if task else set()
        check_attempt(record, attempt)
        examined = diagnose_groups(client, record, tasks=names, attempt=attempt)
        words = "" if examined else no_verdict(record)
        if format_type is Format.JSON:
            import json

            print(json.dumps(diagnoses_json(record, examined, words), indent=2))
        elif words:
            print(words)
        else:
            print(diagnoses_text(record, examined, Paint.of(sys.stdout)), end="")
