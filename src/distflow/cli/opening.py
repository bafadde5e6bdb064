"""The client as commands use it: its remarks go to standard error, and output may end when its reader has seen enough."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from distflow.client.client import Client
from distflow.documents.printable import plain_lines

if TYPE_CHECKING:
    from distflow.state.record import WorkflowRecord

__all__ = ["WorkflowArgument", "complete_workflow", "open_client", "open_workflow", "until_closed"]

_COMPLETIONS = 50


def open_client() -> Client:
    """Return a client for one command."""
    return Client(notify=_print_remark)


def _print_remark(text: str) -> None:
    print(plain_lines(text), file=sys.stderr)


def complete_workflow(incomplete: str) -> list[str]:
    """Return the newest ids that begin so. Never raises and never prints: a shell is waiting at a prompt."""
    from distflow.client.workflows import newest_ids

    try:
        with Client() as client:
            return [one for one in newest_ids(client, _COMPLETIONS) if one.startswith(incomplete)]
    except Exception:  # noqa: BLE001  no completion is better than a traceback in the prompt
        return []


WorkflowArgument = Annotated[
    str,
    typer.Argument(
        metavar="ID", help="The workflow: its id (<name>-<n>) or uuid.", show_default=False, autocompletion=complete_workflow
    ),
]


@contextmanager
def open_workflow(key: str, *, report_age: bool = True) -> Iterator[tuple[Client, WorkflowRecord]]:
    """Find a workflow, and see to it that unfinished work has a supervisor."""
    from distflow.client.workflows import find_workflow

    with open_client() as client:
        record = find_workflow(client, key, report_age=report_age)
        with until_closed():
            yield client, record


@contextmanager
def until_closed() -> Iterator[None]:
    """End quietly and well when the reader of our output (``head``, ``less``) has seen enough."""
    try:
        yield
    except BrokenPipeError:
        raise typer.Exit(0) from None
