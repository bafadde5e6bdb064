"""Open the client for a command, with its warnings on standard error, and handle closed output pipes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from distflow.cli.completion import complete_workflow
from distflow.cli.render.tables import print_notice
from distflow.client.client import Client
from distflow.errors import InputError, SecretsMissing

if TYPE_CHECKING:
    from distflow.state.record import WorkflowRecord

__all__ = ["WorkflowArgument", "WorkflowsArgument", "open_client", "open_submit_client", "open_workflow", "until_closed"]


def open_client() -> Client:
    """Return a client that prints its notes and warnings to standard error."""
    return Client(notify=print_notice)


@contextmanager
def open_submit_client() -> Iterator[Client]:
    """Open a client. If secrets of an earlier workflow are missing, the error names the option for them."""
    with open_client() as client:
        try:
            yield client
        except SecretsMissing as error:
            raise InputError(error.message, hint=f"use {error.options}") from None


WorkflowArgument = Annotated[
    str,
    typer.Argument(
        metavar="ID",
        help="The id or uuid of the workflow, its name for the latest run, or - for the latest workflow.",
        show_default=False,
        autocompletion=complete_workflow,
    ),
]
WorkflowsArgument = Annotated[
    list[str],
    typer.Argument(
        metavar="ID...",
        help="The ids or uuids of workflows, names for their latest runs, or - for the latest workflow.",
        autocompletion=complete_workflow,
    ),
]


@contextmanager
def open_workflow(key: str, *, report_age: bool = True) -> Iterator[tuple[Client, WorkflowRecord]]:
    """Open a client and find a workflow. The arguments are those of ``find_workflow``."""
    from distflow.client.workflows import find_workflow

    with open_client() as client:
        record = find_workflow(client, key, report_age=report_age)
        with until_closed():
            yield client, record


@contextmanager
def until_closed() -> Iterator[None]:
    """Exit with code 0 if the reader of the output (``head``, ``less``) closes the pipe."""
    try:
        yield
    except BrokenPipeError:
        raise typer.Exit(0) from None
