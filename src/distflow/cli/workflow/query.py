"""Show the status of a workflow and its tasks: ``distflow workflow query``."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Annotated

import typer

from distflow.cli.context import WorkflowArgument, open_workflow
from distflow.cli.options import Format, FormatOption, command_app
from distflow.cli.render.tables import Paint, terminal_width
from distflow.cli.render.workflow_text import workflow_text
from distflow.client.client import Client, now
from distflow.client.workflows import plan_of, read_status
from distflow.lifecycle.states import State, WorkflowState
from distflow.state.record import WorkflowRecord

__all__ = ["app", "query_document"]

app = command_app()

_FAILED, _NOT_ENDED = 1, 4
"""Exit codes of ``--exit-status``."""


@app.command(epilog="Examples: distflow workflow query pytorch-dist-3  ·  distflow workflow query pytorch-dist-3 --watch")
def query(
    workflow: WorkflowArgument,
    verbose: Annotated[
        bool,
        typer.Option(
            "--verbose", "-v", help="Also show earlier attempts, process ids, start times, messages, the UUID and the priority."
        ),
    ] = False,
    watch: Annotated[bool, typer.Option("--watch", help="Refresh the output until the workflow has ended.")] = False,
    exit_status: Annotated[
        bool, typer.Option("--exit-status", help="Exit with 0 if it completed, 1 if it ended otherwise, 4 if it has not ended.")
    ] = False,
    format_type: FormatOption = Format.TEXT,
) -> None:
    """Show the status of a workflow and its tasks.

    The output has the first cause of each failed group, and the last output line of each task.
    """
    with open_workflow(workflow) as (client, found):
        record, paint = found, Paint.of(sys.stdout)

        def shown(one: WorkflowRecord, is_live: bool = False) -> str:
            status = read_status(client, one)
            return workflow_text(
                one,
                now=now(),
                last_lines=status.last_lines,
                metrics=status.metrics,
                usage=status.usage,
                paint=paint,
                width=terminal_width(sys.stdout),
                verbose=verbose,
                is_live=is_live,
                outputs_until=status.outputs_until,
                remedies=_remedies(client, one),
            )

        if watch:
            from distflow.cli.render.live import watch_workflow

            quiet = format_type is Format.JSON
            record = watch_workflow(client, record, lambda one: shown(one, is_live=True), out=None if quiet else sys.stdout)
        if format_type is Format.JSON:
            import json

            print(json.dumps(query_document(client, record, verbose=verbose), indent=2))
        else:
            print(shown(record), end="")
    if exit_status and record.state is not WorkflowState.COMPLETED:
        raise typer.Exit(_FAILED if record.state.is_final else _NOT_ENDED)


def query_document(client: Client, record: WorkflowRecord, *, verbose: bool = False) -> dict[str, object]:
    """Return the JSON document of ``query``. With ``verbose``, it includes earlier attempts."""
    from distflow.cli.render.workflow_json import workflow_json

    status = read_status(client, record)
    return workflow_json(
        record,
        plan_of(client, record),
        now=now(),
        last_lines=status.last_lines,
        metrics=status.metrics,
        usage=status.usage,
        verbose=verbose,
        outputs_until=status.outputs_until,
        remedies=_remedies(client, record),
    )


def _remedies(client: Client, record: WorkflowRecord) -> Mapping[str, str]:
    """Return the remedy for the failure of each group, if `diagnose` finds more than the exception in the first cause."""
    if not any(group.state is State.FAILED and group.cause is not None for group in record.groups):
        return {}
    from distflow.cli.render.failures import remedies_of
    from distflow.client.failures import diagnose_groups

    return remedies_of(record, diagnose_groups(client, record))
