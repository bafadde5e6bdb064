"""``distflow workflow query``."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from distflow.cli import wiring
from distflow.cli.command import Format, FormatOption, command_app
from distflow.cli.documents import workflow_json
from distflow.cli.metrictext import GroupMetrics
from distflow.cli.reading import WorkflowArgument, open_workflow
from distflow.cli.tables import Paint, terminal_width
from distflow.cli.views import LastLines, workflow_text
from distflow.lifecycle.states import WorkflowState
from distflow.state.directory import StateDirectory
from distflow.state.logs import LogLine
from distflow.state.metrics import Latest, Metric, latest, read_metrics
from distflow.state.record import WorkflowRecord
from distflow.supervisor.clock import SystemClock
from distflow.supervisor.printed_errors import without_launcher

__all__ = ["app"]

app = command_app()

_FAILED, _NOT_ENDED = 1, 4
_TAIL_LINES = 200


@app.command(epilog="Examples: distflow workflow query pytorch-dist-3  ·  distflow workflow query pytorch-dist-3 --watch")
def query(
    workflow: WorkflowArgument,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Also earlier attempts, process ids, start times, messages.")
    ] = False,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Keep showing it until it ends.")] = False,
    exit_status: Annotated[
        bool, typer.Option("--exit-status", help="Exit with 0 completed, 1 ended otherwise, 4 not ended yet.")
    ] = False,
    format_type: FormatOption = Format.TEXT,
) -> None:
    """Show where a workflow stands: its groups, their first cause, and each task with the last line it printed."""
    with open_workflow(workflow) as (directory, store, found):
        record, paint = found, Paint.of(sys.stdout)

        def shown(one: WorkflowRecord) -> str:
            last_lines, metrics = _said(directory, one)
            return workflow_text(
                one,
                now=SystemClock().now(),
                last_lines=last_lines,
                metrics=metrics,
                paint=paint,
                width=terminal_width(sys.stdout),
                verbose=verbose,
            )

        if watch:
            from distflow.cli.live import watch_workflow

            quiet = format_type is Format.JSON
            record = watch_workflow(directory, store, record, shown, out=None if quiet else sys.stdout)
        if format_type is Format.JSON:
            import json

            last_lines, metrics = _said(directory, record)
            document = workflow_json(
                record,
                store.plan(record.uuid),
                now=SystemClock().now(),
                last_lines=last_lines,
                metrics=metrics,
                verbose=verbose,
            )
            print(json.dumps(document, indent=2))
        else:
            print(shown(record), end="")
    if exit_status and record.state is not WorkflowState.COMPLETED:
        raise typer.Exit(_FAILED if record.state.is_final else _NOT_ENDED)


def _said(directory: StateDirectory, record: WorkflowRecord) -> tuple[LastLines, GroupMetrics]:
    """Return the last line of each attempt, and the latest metrics of each group, as far as the logs' last pages show them."""
    mirror = wiring.mirror(directory)
    last_lines: dict[tuple[str, str, int], str] = {}
    metrics: dict[str, Latest] = {}
    for group in record.groups:
        found: list[Metric] = []
        now = {(task.name, task.attempt) for task in group.tasks}
        for task in group.attempts:
            lines = mirror.last_lines(record.uuid, group.name, task.name, task.attempt, _TAIL_LINES)
            if own := without_launcher(lines) or lines:
                last_lines[group.name, task.name, task.attempt] = own[-1]
            if (task.name, task.attempt) in now:
                found += read_metrics(LogLine(task.name, task.attempt, None, line) for line in lines)
        if found:
            metrics[group.name] = min(latest(found), key=lambda one: (one.rank is None, one.rank or 0))
    return last_lines, metrics
