"""``distflow workflow cancel``."""

from __future__ import annotations

import json
import sys
from typing import Annotated

import typer

from distflow.cli.context import open_client
from distflow.cli.options import Format, FormatOption, command_app
from distflow.cli.render.workflow_text import cancel_json, cancel_words, left_behind
from distflow.client.client import Client
from distflow.client.workflows import Cancellation, cancel, pool_of, wait
from distflow.documents.text import plain, plain_lines
from distflow.state.record import WorkflowRecord

__all__ = ["app"]

app = command_app()


@app.command(
    "cancel", epilog="Examples: distflow workflow cancel pytorch-dist-3  ·  distflow workflow cancel a-1 b-2 -m 'wrong data'"
)
def cancel_workflows(
    ids: Annotated[list[str], typer.Argument(metavar="ID...", help="Workflows to end.")],
    message: Annotated[str, typer.Option("--message", "-m", help="Why; kept with the workflow.")] = "",
    force: Annotated[bool, typer.Option("--force", "-f", help="Kill at once, without the grace after TERM.")] = False,
    wait_s: Annotated[
        float | None, typer.Option("--wait", metavar="SECONDS", help="Return when nothing of it is left, or after this time.")
    ] = None,
    format_type: FormatOption = Format.TEXT,
) -> None:
    """End workflows: TERM to every task, KILL after the pool's grace, and proof that nothing is left.

    Every id is tried; if one of them cannot be canceled, the exit code says so. A task whose node is unreachable is stopped as
    soon as the node answers.
    """
    with open_client() as client:
        results = cancel(client, ids, message=message, force=force)
        records = [one.record for one in results if one.record is not None]
        try:
            if format_type is Format.TEXT:
                lines = [line for one in records for line in (f"{one.id}: asked to stop", *_words(client, one))]
                print("".join(f"{line}\n" for line in lines), end="", flush=True)
        finally:
            # Wait even if printing fails because the reader has closed the output.
            if wait_s is not None:
                ended = wait(client, [one.id for one in records], timeout_s=wait_s, on_timeout=lambda one: _words(client, one))
                for words in (words for one in ended for words in left_behind(one)):
                    print(f"warning: {plain(words)}", file=sys.stderr)
    if format_type is Format.JSON:
        print(json.dumps({"workflows": [_json(one) for one in results]}, indent=2))
    failures = [one.error for one in results if one.error is not None]
    for failure in failures:
        print(f"error: {plain_lines(str(failure))}", file=sys.stderr)
    if failures:
        # The JSON document already contains the errors. Raising one would print a second document.
        raise typer.Exit(failures[-1].exit_code)


def _json(one: Cancellation) -> dict[str, object]:
    if one.record is not None:
        return {"name": one.record.id, "out_of_reach": cancel_json(one.record)}
    return {"name": one.key, "error": one.error.message if one.error else None}


def _words(client: Client, record: WorkflowRecord) -> list[str]:
    return [f"{record.id}: {line}" for line in cancel_words(record, pool_of(client, record).node_lost_after_s)]
