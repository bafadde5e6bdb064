"""``distflow workflow why``."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from distflow.cli import wiring
from distflow.cli.command import Format, FormatOption, command_app
from distflow.cli.diagnoses import examine, remedy_of
from distflow.cli.reading import WorkflowArgument, open_workflow
from distflow.cli.tables import Paint, terminal_width
from distflow.cli.verdicts import Verdict, no_verdict, verdict_json, verdict_text
from distflow.errors import NotFound
from distflow.lifecycle.states import State
from distflow.state.mirror import LAST_LINES
from distflow.supervisor.timeline import attempt_of, moments

if TYPE_CHECKING:
    from distflow.state.directory import StateDirectory
    from distflow.state.record import GroupRecord, WorkflowRecord
    from distflow.state.store import Store

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
    with open_workflow(workflow) as (directory, store, record):
        chosen = _choose(record, group or [], attempt)
        verdicts = [_verdict(directory, store, record, one, attempt) for one in chosen]
        words = "" if verdicts else no_verdict(record)
        if format_type is Format.JSON:
            import json

            print(json.dumps(verdict_json(record, verdicts, words), indent=2))
        elif words:
            print(words)
        else:
            print(verdict_text(record, verdicts, paint=Paint.of(sys.stdout), width=terminal_width(sys.stdout)), end="")
            _name_diagnosis(directory, store, record, attempt)


def _name_diagnosis(directory: StateDirectory, store: Store, record: WorkflowRecord, attempt: int | None) -> None:
    """Say what is known of the cause, and what to do about it."""
    retry = "" if attempt is None else f" -r {attempt}"
    known = [diagnosis for one in examine(directory, store, record, attempt=attempt) for diagnosis in one.diagnoses]
    for diagnosis in known[:1]:
        print(f"\nDiagnosis  {diagnosis.cause}\nRemedy     {remedy_of(record, diagnosis)}")
    if known:
        print(f"Details: distflow workflow diagnose {record.id}{retry}")


def _choose(record: WorkflowRecord, names: list[str], attempt: int | None) -> list[GroupRecord]:
    """Return the groups to explain: those that failed, or whose attempt did. Raises ``NotFound`` that says which there are."""
    known = [group.name for group in record.groups]
    for name in names:
        if name not in known:
            from distflow.documents.words import did_you_mean

            raise NotFound(f"{record.id} has no group {name!r}", hint=did_you_mean(name, known, what="groups"))
    asked = [group for group in record.groups if not names or group.name in names]
    if attempt is None:
        return [group for group in asked if group.state is State.FAILED]
    there = [group for group in asked if attempt <= group.attempt]
    if not there:
        most = max((group.attempt for group in asked), default=0)
        raise NotFound(f"{record.id} has no attempt {attempt}", hint=f"attempts are counted from 0; the last is {most}")
    # What was kept of another workflow ran there, and is told there.
    return [group for group in there if not group.kept and (attempt < group.attempt or group.state is State.FAILED)]


def _verdict(
    directory: StateDirectory, store: Store, record: WorkflowRecord, group: GroupRecord, attempt: int | None
) -> Verdict:
    number = group.attempt if attempt is None else attempt
    mirror = wiring.mirror(directory)
    lines = {
        task.name: mirror.last_lines(record.uuid, group.name, task.name, number, LAST_LINES)
        for task in attempt_of(group, number)
    }
    return Verdict(group=group, attempt=number, moments=moments(group, number, list(store.events(record.uuid)), lines))
