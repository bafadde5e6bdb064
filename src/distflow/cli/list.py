"""``distflow workflow list``."""

from __future__ import annotations

import sys
from enum import Enum
from typing import Annotated

import typer

from distflow.cli import wiring
from distflow.cli.command import Format, FormatOption, command_app
from distflow.cli.reading import reading_directory, until_closed, wake
from distflow.cli.tables import Paint
from distflow.cli.views import list_json, list_table
from distflow.errors import InputError
from distflow.lifecycle.states import Reason, WorkflowState, workflow_status_of
from distflow.supervisor.clock import SystemClock

__all__ = ["app"]

app = command_app()


class _Order(str, Enum):
    """Which end the newest is at."""

    ASC = "asc"
    DESC = "desc"


@app.command("list", epilog="Examples: distflow workflow list  ·  distflow workflow list -s RUNNING -s PENDING -t json")
def list_workflows(
    count: Annotated[int, typer.Option("--count", "-c", min=1, help="Show the newest N.")] = 20,
    offset: Annotated[int, typer.Option("--offset", "-f", min=0, help="Skip the newest N.")] = 0,
    name: Annotated[str | None, typer.Option("--name", "-n", help="Only those with this in their id.")] = None,
    status: Annotated[
        list[str] | None, typer.Option("--status", "-s", help="Only those of this status; may be repeated.")
    ] = None,
    pool: Annotated[list[str] | None, typer.Option("--pool", "-p", help="Only those of this pool; may be repeated.")] = None,
    order: Annotated[_Order, typer.Option("--order", "-o", help="asc has the newest at the bottom.")] = _Order.ASC,
    format_type: FormatOption = Format.TEXT,
) -> None:
    """List workflows, the newest at the bottom."""
    ends = _ends(status or [])
    directory = reading_directory()
    with wiring.open_store(directory) as store:
        records = list(store.list(ends=ends, name=name, pools=pool or [], count=count, offset=offset))
        wake(directory, store)
    if order is _Order.ASC:
        records.reverse()
    now = SystemClock().now()
    with until_closed():
        if format_type is Format.JSON:
            import json

            print(json.dumps(list_json(records, now=now), indent=2))
        elif records:
            print(list_table(records, now=now, paint=Paint.of(sys.stdout)), end="")
        else:
            asked = status or name or pool or offset
            print("No workflow matches." if asked else "There are no workflows yet.")


def _ends(statuses: list[str]) -> list[tuple[WorkflowState, Reason | None]]:
    """Return every state and reason that people see as one of these statuses. Raises ``InputError`` for words that are none."""
    known: dict[str, list[tuple[WorkflowState, Reason | None]]] = {}
    for state in WorkflowState:
        for reason in (None, *Reason):
            if state.is_final or reason is None:
                known.setdefault(workflow_status_of(state, reason), []).append((state, reason))
    for status in statuses:
        if status.upper() not in known:
            from distflow.documents.words import did_you_mean

            raise InputError(f"{status!r} is no status of a workflow", hint=did_you_mean(status, known, what="statuses"))
    return [end for status in statuses for end in known[status.upper()]]
