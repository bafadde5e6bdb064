"""``distflow workflow cancel``."""

from __future__ import annotations

import json
import sys
import time
from typing import Annotated

import typer

from distflow.cli import wiring
from distflow.cli.command import Format, FormatOption, command_app
from distflow.cli.reach import cancel_json, cancel_words, left_behind
from distflow.cli.tables import plain, plain_lines
from distflow.errors import DistflowError, InputError
from distflow.state.directory import StateDirectory
from distflow.state.event_details import CancelRequested
from distflow.state.record import CancelRequest, Event, WorkflowRecord
from distflow.state.store import Store
from distflow.supervisor.process import ensure_supervisor

__all__ = ["app"]

app = command_app()

_POLL_S = 0.1


@app.command(epilog="Examples: distflow workflow cancel pytorch-dist-3  ·  distflow workflow cancel a-1 b-2 -m 'wrong data'")
def cancel(
    ids: Annotated[list[str], typer.Argument(metavar="ID...", help="Workflows to end.")],
    message: Annotated[str, typer.Option("--message", "-m", help="Why; kept with the workflow.")] = "",
    force: Annotated[bool, typer.Option("--force", "-f", help="Kill at once, without the grace after TERM.")] = False,
    wait: Annotated[
        float | None, typer.Option("--wait", metavar="SECONDS", help="Return when nothing of it is left, or after this time.")
    ] = None,
    format_type: FormatOption = Format.TEXT,
) -> None:
    """End workflows: TERM to every task, KILL after the pool's grace, and proof that nothing is left.

    Every id is tried; if one of them cannot be canceled, the exit code says so. A task whose node is unreachable is stopped as
    soon as the node answers.
    """
    directory = wiring.state_directory()
    failures: list[DistflowError] = []
    lines: list[str] = []
    results: list[dict[str, object]] = []
    with wiring.open_store(directory) as store:
        for key in ids:
            try:
                record = _request(store, key, message, force)
            except DistflowError as error:
                failures.append(error)
                results.append({"name": key, "error": error.message})
                continue
            results.append({"name": record.id, "out_of_reach": cancel_json(record)})
            lines += [f"{record.id}: asked to stop", *_words(store, record)]
        if len(failures) < len(ids):
            ensure_supervisor(directory)
        try:
            # Only now, as nobody may read it.
            if format_type is Format.TEXT:
                print("".join(f"{line}\n" for line in lines), end="", flush=True)
        finally:
            if wait is not None:
                asked = [str(item["name"]) for item in results if "error" not in item]
                _await_end(directory, store, asked, wait)
                for words in (words for key in asked for words in left_behind(store.find(key))):
                    print(f"warning: {plain(words)}", file=sys.stderr)
    if format_type is Format.JSON:
        print(json.dumps({"workflows": results}, indent=2))
    if failures:
        for failure in failures:
            print(f"error: {plain_lines(str(failure))}", file=sys.stderr)
        # Each stands in the one JSON document too; raised, the last would become a second one.
        raise typer.Exit(failures[-1].exit_code)


def _request(store: Store, key: str, message: str, force: bool) -> WorkflowRecord:
    record = store.find(key)
    if record.state.is_final:
        raise InputError(f"{record.id} has ended already: {record.status}")
    now, user = time.time(), wiring.user_name()  # noqa: TID251  the moment of the request
    told = CancelRequested(user=user, message=message, is_forced=force)
    request = CancelRequest(at=now, by=user, message=message, force=force)
    store.request_cancel(record.uuid, request, Event(at=now, details=told, workflow=record.uuid))
    return record


def _words(store: Store, record: WorkflowRecord) -> list[str]:
    return [f"{record.id}: {line}" for line in cancel_words(record, store.pool(record.uuid).node_lost_after_s)]


def _await_end(directory: StateDirectory, store: Store, ids: list[str], seconds: float) -> None:
    from threading import Event as Pause

    pause, deadline = Pause(), time.monotonic() + seconds
    while any(not store.find(key).state.is_final for key in ids):
        if time.monotonic() >= deadline:
            late = [record for key in ids if not (record := store.find(key)).state.is_final]
            hint = [line for record in late for line in _words(store, record)]
            raise _StillThere(
                f"not ended within {seconds:g} s: {', '.join(record.id for record in late)}",
                hint="\n".join([*hint, f"the supervisor goes on; its log: {directory.supervisor_log}"]),
            )
        pause.wait(_POLL_S)


class _StillThere(DistflowError):
    exit_code = 3
