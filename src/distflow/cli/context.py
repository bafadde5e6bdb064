"""Open the client for a command, with its warnings on standard error, and handle closed output pipes."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from distflow.client.client import Client
from distflow.documents.text import plain_lines

if TYPE_CHECKING:
    from distflow.state.record import WorkflowRecord

__all__ = ["WorkflowArgument", "complete_workflow", "open_client", "open_workflow", "until_closed"]

_COMPLETIONS = 50


def open_client() -> Client:
    """Return a client that prints its notes and warnings to standard error."""
    return Client(notify=_print_notice)


def _print_notice(text: str) -> None:
    print(plain_lines(text), file=sys.stderr)


def complete_workflow(incomplete: str) -> list[str]:
    """Return the newest ids that begin with a text, for shell completion. It never raises an error and never prints."""
    from distflow.client.workflows import newest_ids

    try:
        with Client() as client:
            return [one for one in newest_ids(client, _COMPLETIONS) if one.startswith(incomplete)]
    except Exception:  # noqa: BLE001  do not print a traceback into the shell's prompt
        return []


WorkflowArgument = Annotated[
    str,
    typer.Argument(
        metavar="ID",
        help="The id or uuid of the workflow, its name for the latest run, or - for the latest workflow.",
        show_default=False,
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
