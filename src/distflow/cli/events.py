"""``distflow workflow events``."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from distflow.cli.command import Format, command_app
from distflow.cli.documents import event_json
from distflow.cli.reading import WorkflowArgument, choose_tasks, open_workflow, pause, wake
from distflow.cli.views import event_line

if TYPE_CHECKING:
    from distflow.state.directory import StateDirectory
    from distflow.state.record import Event, WorkflowRecord
    from distflow.state.store import Store

__all__ = ["app"]

app = command_app()

_POLL_S = 0.3
_WAKE_EVERY = 20
"""Looks between two checks that a supervisor is at work."""


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
    with open_workflow(workflow) as (directory, store, record):
        names = {one.name for _, one in choose_tasks(record, task or [])} if task else None
        told = _follow(directory, store, record) if follow else iter(store.events(record.uuid))
        wanted = (event for event in told if (names is None or event.task in names) and retry_id in (None, event.attempt))
        if format_type is Format.JSON and not follow:
            print(json.dumps({"events": [event_json(event) for event in wanted]}, indent=2))
            return
        for event in wanted:
            print(json.dumps(event_json(event)) if format_type is Format.JSON else event_line(event), flush=follow)


def _follow(directory: StateDirectory, store: Store, record: WorkflowRecord) -> Iterator[Event]:
    last, looks = 0, 0
    while True:
        # Asked before the events are, so that those of the end are among them.
        over = store.find(record.uuid).state.is_final
        for event in store.events(record.uuid, after=last):
            last = event.sequence
            yield event
        if over:
            return
        looks += 1
        if looks % _WAKE_EVERY == 0:
            wake(directory, store)
        pause(_POLL_S)
