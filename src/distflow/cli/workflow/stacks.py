"""``distflow workflow stacks``."""

from __future__ import annotations

import json
import sys
from typing import Annotated

import typer

from distflow.cli.context import WorkflowArgument, open_workflow
from distflow.cli.options import Format, command_app
from distflow.cli.render.stacks import stacks_json, stacks_text
from distflow.cli.render.tables import Paint
from distflow.errors import NodeError

__all__ = ["app"]

app = command_app()


@app.command(epilog="Examples: distflow workflow stacks pytorch-dist-3  ·  distflow workflow stacks pytorch-dist-3 -t worker")
def stacks(
    workflow: WorkflowArgument,
    task: Annotated[list[str] | None, typer.Option("--task", "-t", help="Only of this task; may be repeated.")] = None,
    format_type: Annotated[Format, typer.Option("--format-type", help="text or json.")] = Format.TEXT,
) -> None:
    """Show where the processes of a running workflow are just now: the Python calls of each rank, equal ones together.

    Nothing is stopped or slowed down. Python stacks need py-spy on the nodes, but for ranks of distflow.train, which write
    theirs themselves; without either the kernel's word is shown. Ranks of distflow.train also tell which collective they are
    at: who has not come to the one that others wait in is named.
    """
    with open_workflow(workflow) as (client, record):
        # Most callers do not need these modules.
        from distflow.cli.render.terminal_line import BottomLine
        from distflow.client.running_tasks import read_stacks

        bottom = BottomLine(sys.stderr)
        try:
            seen = read_stacks(client, record, task or (), on_start=lambda count: bottom.show(f"asking {count} nodes …"))
        finally:
            bottom.clear()
        if format_type is Format.JSON:
            print(json.dumps(stacks_json(record.id, seen), indent=2))
        else:
            print(stacks_text(record.id, seen, Paint.of(sys.stdout)), end="")
    if all(one.error for one in seen):
        raise typer.Exit(NodeError.exit_code)
