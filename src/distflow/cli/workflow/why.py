"""Explain workflows that failed or hang: ``distflow workflow why``, ``diagnose`` and ``stacks``."""

from __future__ import annotations

import json
import sys
from collections.abc import Collection, Sequence
from typing import Annotated

import typer

from distflow.cli.completion import complete_group
from distflow.cli.context import WorkflowArgument, open_workflow
from distflow.cli.options import AttemptOption, Format, FormatOption, TasksOption, command_app
from distflow.cli.render.failures import (
    diagnoses_json,
    diagnoses_text,
    failures_json,
    failures_text,
    finding_lines,
    no_failure_text,
)
from distflow.cli.render.stacks import stacks_json, stacks_text
from distflow.cli.render.tables import Paint, terminal_width
from distflow.client.client import Client
from distflow.client.failures import DiagnosedGroup, check_attempt, diagnose_groups, explain_failures, remedy_of
from distflow.client.workflows import choose_tasks
from distflow.documents.quantities import count_text
from distflow.errors import NodeError
from distflow.state.record import WorkflowRecord

__all__ = ["diagnose_app", "diagnose_document", "stacks_app", "why_app", "why_document"]


why_app = command_app()


@why_app.command(epilog="Examples: distflow workflow why pytorch-dist-3  ·  distflow workflow why pytorch-dist-3 -r 0 -t json")
def why(
    workflow: WorkflowArgument,
    group: Annotated[
        list[str] | None,
        typer.Option("--group", "-g", help="Only this group; may be repeated.", autocompletion=complete_group),
    ] = None,
    attempt: AttemptOption = None,
    format_type: FormatOption = Format.TEXT,
) -> None:
    """Show why a workflow failed.

    The output has the first cause of each failed group, and a timeline of its nodes around the failure.
    """
    with open_workflow(workflow) as (client, record):
        if format_type is Format.JSON:
            print(json.dumps(why_document(client, record, groups=group or (), attempt=attempt), indent=2))
            return
        failures = explain_failures(client, record, groups=group or (), attempt=attempt)
        if not failures:
            print(no_failure_text(record, group or ()))
            _print_findings(diagnose_groups(client, record, groups=group or (), attempt=attempt, with_findings=True))
        else:
            print(failures_text(record, failures, paint=Paint.of(sys.stdout), width=terminal_width(sys.stdout)), end="")
            _print_diagnosis(client, record, group or (), attempt)


def why_document(
    client: Client, record: WorkflowRecord, *, groups: Sequence[str] = (), attempt: int | None = None
) -> dict[str, object]:
    """Return the JSON document of ``why``."""
    failures = explain_failures(client, record, groups=groups, attempt=attempt)
    return failures_json(record, failures, "" if failures else no_failure_text(record, groups))


def _print_diagnosis(client: Client, record: WorkflowRecord, groups: Sequence[str], attempt: int | None) -> None:
    """Print the first diagnosis with its remedy, if a rule applies, and all findings."""
    retry = "" if attempt is None else f" -r {attempt}"
    examined = diagnose_groups(client, record, groups=groups, attempt=attempt, with_findings=True)
    known = [diagnosis for one in examined for diagnosis in one.diagnoses]
    for diagnosis in known[:1]:
        print(f"\nDiagnosis  {diagnosis.cause}\nRemedy     {remedy_of(record, diagnosis)}")
    _print_findings(examined)
    if known or any(one.findings for one in examined):
        print(f"Details: distflow workflow diagnose {record.id}{retry}")


def _print_findings(examined: Sequence[DiagnosedGroup]) -> None:
    for line in finding_lines(examined):
        print(f"Finding    {line}")


diagnose_app = command_app()


@diagnose_app.command(
    epilog="Examples: distflow workflow diagnose pytorch-dist-3  ·  distflow workflow diagnose digits-3 --task worker -t json"
)
def diagnose(
    workflow: WorkflowArgument,
    task: TasksOption = None,
    attempt: AttemptOption = None,
    format_type: FormatOption = Format.TEXT,
) -> None:
    """Show the known cause of a failed or hanging gang, and its remedy.

    The diagnosis uses stored logs, exit codes and the recorded use of resources: it also reports idle GPUs, slow input,
    throttling and growing memory. No node is contacted.
    """
    with open_workflow(workflow) as (client, record):
        names = {one.name for _, one in choose_tasks(record, task)} if task else set()
        check_attempt(record, attempt)
        if format_type is Format.JSON:
            print(json.dumps(diagnose_document(client, record, tasks=names, attempt=attempt), indent=2))
            return
        examined = diagnose_groups(client, record, tasks=names, attempt=attempt, with_findings=True)
        if not any(one.is_failure for one in examined):
            print(no_failure_text(record, _groups_of(record, names)))
        if examined:
            print(diagnoses_text(record, examined, Paint.of(sys.stdout)), end="")


def diagnose_document(
    client: Client, record: WorkflowRecord, *, tasks: Collection[str] = (), attempt: int | None = None
) -> dict[str, object]:
    """Return the JSON document of ``diagnose``."""
    examined = diagnose_groups(client, record, tasks=tasks, attempt=attempt, with_findings=True)
    return diagnoses_json(record, examined, "" if examined else no_failure_text(record, _groups_of(record, tasks)))


def _groups_of(record: WorkflowRecord, tasks: Collection[str]) -> list[str]:
    return [group.name for group in record.groups if any(task.name in tasks for task in group.tasks)]


stacks_app = command_app()


@stacks_app.command(
    epilog="Examples: distflow workflow stacks pytorch-dist-3  ·  distflow workflow stacks pytorch-dist-3 --task worker"
)
def stacks(
    workflow: WorkflowArgument,
    task: TasksOption = None,
    format_type: FormatOption = Format.TEXT,
) -> None:
    """Show the current call stacks of a running workflow.

    Equal stacks are shown together. Processes are not stopped or slowed down. Python stacks need py-spy on the nodes, or ranks
    that use distflow.train. Otherwise, the state of each process in the kernel is shown. Ranks that use distflow.train also
    report their current collective, so the ranks that others wait for are named.
    """
    with open_workflow(workflow) as (client, record):
        # Import these modules here, because other commands do not need them.
        from distflow.cli.render.terminal import BottomLine
        from distflow.client.running_tasks import read_stacks

        bottom = BottomLine(sys.stderr)
        try:
            found = read_stacks(
                client,
                record,
                task or (),
                on_start=lambda count: bottom.show(f"reading the stacks on {count_text(count, 'node')} …"),
            )
        finally:
            bottom.clear()
        if format_type is Format.JSON:
            print(json.dumps(stacks_json(record.id, found), indent=2))
        else:
            print(stacks_text(record.id, found, Paint.of(sys.stdout)), end="")
    if all(one.error for one in found):
        raise typer.Exit(NodeError.exit_code)
