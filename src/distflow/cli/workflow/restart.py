"""``distflow workflow restart``."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from distflow.cli.context import WorkflowArgument, open_client
from distflow.cli.options import Format, FormatOption, command_app
from distflow.cli.render.submission import FetchLine, print_submitted, wait_for_end, warn
from distflow.cli.workflow.submit import parse_overrides
from distflow.client.submitting.restarting import plan_restart, restart

__all__ = ["app"]

app = command_app()


@app.command("restart", epilog="Example: distflow workflow restart pipeline-3 --wait")
def restart_workflow(
    workflow: WorkflowArgument,
    set_env: Annotated[
        list[str] | None,
        typer.Option("--set-env", metavar="NAME[=VALUE]", help="Give a secret value again; those of the run are not kept."),
    ] = None,
    pool: Annotated[str | None, typer.Option("--pool", "-p", help="Run in this pool; else in the one it ran in.")] = None,
    wait: Annotated[bool, typer.Option("--wait", "-w", help="Follow the logs and end as the workflow ends.")] = False,
    format_type: FormatOption = Format.TEXT,
) -> None:
    """Run the groups of a workflow that did not complete once more, as a new workflow.

    Groups that completed are kept: they do not run, and what their tasks wrote is fetched from their nodes for those that take
    it. Spec, labels and priority are those of the run; files that the spec sends are read anew.
    """
    overrides = parse_overrides([], [], set_env or [])
    with open_client() as client:
        wanted = plan_restart(client, workflow, overrides, pool=pool)
        warn(wanted.planned.checked.warnings)
        is_quiet = wait and format_type is Format.JSON
        with FetchLine(sys.stderr) as line:
            record = restart(
                client,
                wanted,
                on_stored=None if is_quiet else lambda stored: print_submitted(stored, format_type),
                on_fetch=line.show,
            )
        if wait:
            wait_for_end(client, record, format_type)
