"""``distflow workflow rsync``: copy files to and from a running task with rsync, over distflow's connection to the node."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from distflow.cli.completion import complete_task, complete_workflow
from distflow.cli.context import WorkflowArgument, open_client
from distflow.cli.options import ConnectTimeoutOption, Format, FormatOption, command_app
from distflow.cli.render.tables import table
from distflow.client.client import Client
from distflow.client.rsync.copies import (
    DEBOUNCE_S,
    LOG_BYTES,
    POLL_S,
    RECONCILE_S,
    Sync,
    Syncs,
    local_path,
    remote_path,
    rsync_options,
    rsync_with_task,
    start_sync,
    start_sync_to_first_lead,
    stop_syncs,
    syncs_of,
)
from distflow.documents.quantities import local_second, times
from distflow.documents.text import plain
from distflow.errors import InputError
from distflow.state.record import WorkflowRecord

__all__ = ["app", "copy_to_first_lead", "split_local", "split_pair"]

app = command_app(no_args_is_help=True)

_PairArgument = Annotated[
    list[str], typer.Argument(metavar="[TASK] PATHS", help="The task and the paths. Default task: the lead of the first group.")
]
_TimeoutOption = Annotated[
    int | None, typer.Option("--timeout", metavar="SECONDS", min=1, help="Stop after this time without any data.")
]
_RateOption = Annotated[
    int | None,
    typer.Option(
        "--rate-limit", "--upload-rate-limit", metavar="BYTES", min=1024, help="The maximum number of bytes per second."
    ),
]
_VerboseOption = Annotated[bool, typer.Option("--verbose", "-v", help="List every file.")]
_QuietOption = Annotated[bool, typer.Option("--no-progress", help="Do not show progress in a terminal.")]


@app.callback()
def _rsync() -> None:
    """Copy files to and from a running task with rsync.

    Only differences are copied, and no file is ever deleted.
    """


@app.command(
    epilog="Examples: distflow workflow rsync upload pytorch-dist-3 worker ./src:src  ·  "
    "distflow workflow rsync upload pytorch-dist-3 ./src/:/scratch/src --daemon"
)
def upload(
    workflow: WorkflowArgument,
    words: _PairArgument,
    timeout: _TimeoutOption = None,
    rate_limit: _RateOption = None,
    connect_timeout: ConnectTimeoutOption = 60,
    verbose: _VerboseOption = False,
    no_progress: _QuietOption = False,
    daemon: Annotated[
        bool, typer.Option("--daemon", help="Copy in the background at every change, until the task's group has ended.")
    ] = False,
    poll_interval: Annotated[
        float | None,
        typer.Option(
            "--poll-interval",
            metavar="SECONDS",
            min=0.1,
            help="With --daemon: the interval between scans of the files. Default: 1.",
        ),
    ] = None,
    debounce_delay: Annotated[
        float | None,
        typer.Option(
            "--debounce-delay",
            metavar="SECONDS",
            min=0,
            help="With --daemon: the time to wait after a change for further ones. Default: 1.",
        ),
    ] = None,
    reconcile_interval: Annotated[
        float | None,
        typer.Option(
            "--reconcile-interval", metavar="SECONDS", min=1, help="With --daemon: copy at least at this interval. Default: 60."
        ),
    ] = None,
    max_log_size: Annotated[
        int | None,
        typer.Option(
            "--max-log-size",
            metavar="BYTES",
            min=1024,
            help="With --daemon: the size at which the log is rotated. Default: 2 MiB.",
        ),
    ] = None,
) -> None:
    r"""Copy local files to a running task: LOCAL:REMOTE.

    A relative REMOTE is below the task's working directory, and {{output}} is its output directory. A directory keeps its name;
    with a trailing slash, its contents are copied. Write a colon in LOCAL as \:. rsync must be installed on this machine and on
    the node.
    """
    task, pair = _parse(words)
    local, remote = split_local(pair)
    daemon_options = {
        "--poll-interval": poll_interval, "--debounce-delay": debounce_delay, "--reconcile-interval": reconcile_interval,
        "--max-log-size": max_log_size,
    }  # fmt: skip
    if not daemon:
        if ignored := [name for name, value in daemon_options.items() if value is not None]:
            raise InputError(f"{ignored[0]} needs --daemon")
        options = rsync_options(timeout, rate_limit, verbose=verbose, progress=_progress(no_progress))
        _run(workflow, task, connect_timeout, [*options, "--", local, f"node:{remote}"])
        return
    with open_client() as client:
        sync = start_sync(
            client, workflow, task, local, remote,
            options=rsync_options(timeout, rate_limit, verbose=verbose, progress=False),
            connect_timeout=connect_timeout,
            poll_s=POLL_S if poll_interval is None else poll_interval,
            debounce_s=DEBOUNCE_S if debounce_delay is None else debounce_delay,
            reconcile_s=RECONCILE_S if reconcile_interval is None else reconcile_interval,
            max_log_size=LOG_BYTES if max_log_size is None else max_log_size,
        )  # fmt: skip
        _print_started(client, sync)


@app.command(
    epilog="Examples: distflow workflow rsync download pytorch-dist-3 worker {{output}}/:results  ·  "
    "distflow workflow rsync download pytorch-dist-3 logs/train.txt:."
)
def download(
    workflow: WorkflowArgument,
    words: _PairArgument,
    timeout: _TimeoutOption = None,
    rate_limit: _RateOption = None,
    connect_timeout: ConnectTimeoutOption = 60,
    verbose: _VerboseOption = False,
    no_progress: _QuietOption = False,
) -> None:
    r"""Copy files of a running task to a local directory: REMOTE:LOCAL.

    A relative REMOTE is below the task's working directory, and {{output}} is its output directory. A directory keeps its name;
    with a trailing slash, its contents are copied. Write a colon in REMOTE as \:. rsync must be installed on this machine
    and on the node.
    """
    task, pair = _parse(words)
    remote, local = split_pair(pair, "REMOTE:LOCAL")
    if os.path.lexists(local) and not os.path.isdir(local):
        raise InputError(f"`{local}` is not a directory", hint="give a directory as LOCAL; the files are copied into it")
    options = rsync_options(timeout, rate_limit, verbose=verbose, progress=_progress(no_progress))
    _run(workflow, task, connect_timeout, [*options, "--", f"node:{remote_path(remote)}", f"{local_path(local).rstrip('/')}/"])


@app.command(epilog="Example: distflow workflow rsync status")
def status(format_type: FormatOption = Format.TEXT) -> None:
    """List background copies, including recent ones that have ended."""
    with open_client() as client:
        syncs = syncs_of(client)
    found = syncs.list()
    if format_type is Format.JSON:
        print(json.dumps(_syncs_json(syncs, found), indent=2))
    elif found:
        print(_syncs_text(syncs, found), end="")
    else:
        print("There are no background copies.")


@app.command(epilog="Examples: distflow workflow rsync stop pytorch-dist-3  ·  distflow workflow rsync stop")
def stop(
    workflow: Annotated[
        str | None,
        typer.Argument(
            metavar="[ID]",
            help="Only copies to this workflow: its id, uuid or name, or - for the latest one.",
            autocompletion=complete_workflow,
        ),
    ] = None,
    task: Annotated[
        str | None, typer.Option("--task", metavar="NAME", help="Only copies to this task.", autocompletion=complete_task)
    ] = None,
    format_type: FormatOption = Format.TEXT,
) -> None:
    """Stop background copies: all, or those to one workflow.

    Copied files stay.
    """
    with open_client() as client:
        syncs, chosen = syncs_of(client), stop_syncs(client, workflow, task)
    if format_type is Format.TEXT:
        for one in chosen:
            print(f"{one.workflow_id} {one.task}: stopped")
    if format_type is Format.JSON:
        names = {(one.workflow, one.task) for one in chosen}
        print(json.dumps(_syncs_json(syncs, [one for one in syncs.list() if (one.workflow, one.task) in names]), indent=2))
    elif not chosen:
        print("No background copy is running.")


def split_local(pair: str) -> tuple[str, str]:
    """Return the paths of LOCAL:REMOTE in rsync's syntax. Raises ``InputError`` if one is missing or LOCAL does not exist."""
    local, remote = split_pair(pair, "LOCAL:REMOTE")
    if not os.path.lexists(local):
        raise InputError(f"`{local}` does not exist on this machine")
    return local_path(local), remote_path(remote)


def split_pair(pair: str, form: str) -> tuple[str, str]:
    r"""Split ``A:B`` at the first colon that is not written as ``\:``. Raises ``InputError`` if a path is missing.

    >>> split_pair(r"a\:b/c:d:e", "LOCAL:REMOTE")
    ('a:b/c', 'd:e')
    """
    at = next((at for at, letter in enumerate(pair) if letter == ":" and pair[at - 1 : at] != "\\"), -1)
    first, second = pair[: max(at, 0)].replace("\\:", ":"), pair[at + 1 :]
    if at < 0 or not first or not second:
        raise InputError(
            f"`{pair}` is not of the form {form}", hint="use `.` for the current directory or the task's working directory"
        )
    return first, second.replace("\\:", ":")


def copy_to_first_lead(client: Client, record: WorkflowRecord, local: str, remote: str) -> None:
    """Start a background copy to the lead task of a workflow's first group, and print a message about it."""
    _print_started(client, start_sync_to_first_lead(client, record, local, remote))


def _print_started(client: Client, sync: Sync) -> None:
    log = syncs_of(client).log(sync)
    print(f"{sync.local} is copied to {sync.task} until the task's group has ended. Log: {log}", file=sys.stderr)


def _parse(words: Sequence[str]) -> tuple[str | None, str]:
    if len(words) > 2:
        hint = "write [TASK] and one pair; copy a directory instead of several files"
        raise InputError(f"{len(words)} arguments are given, but only a task and one pair of paths are possible", hint=hint)
    return (words[0] if len(words) == 2 else None), words[-1]


def _progress(no_progress: bool) -> bool:
    return not no_progress and sys.stdout.isatty()


def _run(workflow: str, task: str | None, connect_timeout: int, arguments: Sequence[str]) -> None:
    with open_client() as client:
        rsync_with_task(client, workflow, task, connect_timeout, arguments)


def _syncs_text(syncs: Syncs, found: Sequence[Sync]) -> str:
    """Return a table of the background copies, and below it one line for each of them that has an error."""
    header = ("Workflow ID", "Task Name", "PID", "Status", "Last Synced", "Local Path", "Remote Path", "Log File")
    rows = [
        (
            one.workflow_id, one.task, str(one.pid), _status(syncs, one),
            local_second(one.synced_at) if one.synced_at is not None else "", plain(one.local), plain(one.remote),
            str(syncs.log(one)),
        )
        for one in found
    ]  # fmt: skip
    errors = [f"{one.workflow_id} {one.task}: the last copy failed: {plain(one.error)}\n" for one in found if one.error]
    return table(header, rows) + "".join(errors)


def _syncs_json(syncs: Syncs, found: Sequence[Sync]) -> dict[str, object]:
    return {
        "daemons": [
            {
                "workflow_id": one.workflow_id, "workflow_uuid": one.workflow, "task_name": one.task, "pid": one.pid,
                "status": _status(syncs, one), **times(last_synced=one.synced_at), "local_path": one.local,
                "remote_path": one.remote, "log_file": str(syncs.log(one)), "error": one.error or None,
            }
            for one in found
        ]
    }  # fmt: skip


def _status(syncs: Syncs, sync: Sync) -> str:
    return "RUNNING" if syncs.is_running(sync) else "STOPPED"
