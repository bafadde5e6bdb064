"""``distflow workflow why``."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from distflow.cli.context import WorkflowArgument, open_workflow
from distflow.cli.options import Format, FormatOption, command_app
from distflow.cli.render.failures import no_verdict, remedy_of, verdict_json, verdict_text
from distflow.cli.render.tables import Paint, terminal_width
from distflow.client.client import Client
from distflow.client.failures import diagnose_groups, explain_failures
from distflow.state.record import WorkflowRecord

__all__ = ["app"]

app = command_app()


@app.command(epilog="Examples: distflow workflow why pytorch-dist-3  ·  distflow workflow why pytorch-dist-3 -r 0 -t json")
def why(
    workflow: WorkflowArgument,
    group: Annotated[list[str] | None, typer.Option("--group", "-g", help="Only of this group; may be repeated.")] = None,
    attempt: Annotated[
        int | None, typer.Option("--retry-id", "-r", min=0, help="Of this attempt, counted from 0; default: the last.")
    ] = None,
    format_type: FormatOption = Format.TEXT,
) -> None:
    """Tell why a workflow failed: the first cause of each failed group in full, and what happened on its nodes around it."""
    with open_workflow(workflow) as (client, record):
        verdicts = explain_failures(client, record, groups=group or (), attempt=attempt)
        words = "" if verdicts else no_verdict(record)
        if format_type is Format.JSON:
            import json

            print(json.dumps(verdict_json(record, verdicts, words), indent=2))
        elif words:
            print(words)
        else:
            print(verdict_text(record, verdicts, paint=Paint.of(sys.stdout), width=terminal_width(sys.stdout)), end="")
            _print_diagnosis(client, record, attempt)


def _print_diagnosis(client: Client, record: WorkflowRecord, attempt: int | None) -> None:
    """Print the most specific diagnosis and its remedy, if a rule applies."""
    retry = "" if attempt is None else f" -r {attempt}"
    known = [diagnosis for one in diagnose_groups(client, record, attempt=attempt) for diagnosis in one.diagnoses]
    for diagnosis in known[:1]:
        print(f"\nDiagnosis  {diagnosis.cause}\nRemedy     {remedy_of(record, diagnosis)}")
    if known:
        print(f"Details: distflow workflow diagnose {record.id}{retry}")
