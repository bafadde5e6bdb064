"""``distflow workflow spec``."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from distflow.cli.context import WorkflowArgument, open_workflow
from distflow.cli.options import command_app
from distflow.client.workflows import read_spec
from distflow.documents.text import plain_lines

__all__ = ["app"]

app = command_app()


@app.command(epilog="Example: distflow workflow spec pytorch-dist-3 --template > again.yaml")
def spec(
    workflow: WorkflowArgument,
    template: Annotated[
        bool, typer.Option("--template", help="As it was submitted, before its values were filled in.")
    ] = False,
) -> None:
    """Print a workflow's spec as it ran. Values of --set-env are never part of it."""
    with open_workflow(workflow, report_age=False) as (client, record):
        text = read_spec(client, record, template=template)
        text = text if text.endswith("\n") else f"{text}\n"
        # A node may have forged the spec of an adopted workflow. Escape control characters, which could hide lines.
        sys.stdout.write(plain_lines(text) if sys.stdout.isatty() else text)
