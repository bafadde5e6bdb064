"""``distflow workflow rsync``: rsync itself, to a running task, through the connection that distflow has to its node."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from distflow.cli.beside import Place, find_place
from distflow.cli.command import Format, FormatOption
from distflow.cli.reading import WorkflowArgument, choose_tasks, complete_workflow, open_workflow, reading_directory
from distflow.cli.rsyncing import (
    check_there,
    first_lead,
    here,
    meaning,
    program,
    rsync_command,
    rsync_options,
    split_pair,
    there,
)
from distflow.cli.rsyncs import start_sync, syncs_json, syncs_text
from distflow.errors import InputError, NodeError, NotFound
from distflow.state.directory import StateDirectory
from distflow.state.record import WorkflowRecord
from distflow.state.syncs import Sync, Syncs

__all__ = ["app", "rsync_beside", "split_local"]

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, add_completion=False)

_POLL_S, _DEBOUNCE_S, _RECONCILE_S, _LOG_BYTES = 1.0, 1.0, 60.0, 2 << 20

_PairArgument = Annotated[
    list[str], typer.Argument(metavar="[TASK] PATHS", help="The task (else the lead of the first group).")
]
_TimeoutOption = Annotated[
    int | None, typer.Option("--timeout", metavar="SECONDS", min=1, help="Give up when nothing came for so long.")
]
_RateOption = Annotated[
    int | None, typer.Option("--rate-limit", "--upload-rate-limit", metavar="BYTES", min=1024, help="Bytes a second at most.")
]
_ConnectOption = Annotated[
    int, typer.Option("--connect-timeout", metavar="SECONDS", min=1, help="How long the node may take to answer.")
]
_VerboseOption = Annotated[bool, typer.Option("--verbose", "-v", help="Name every file.")]
_QuietOption = Annotated[bool, typer.Option("--no-progress", help="Do not show how far it is, in a terminal.")]


@app.callback()
def _rsync() -> None:
    """Copy files to and from a running task, as rsync does: only what differs, and nothing is ever deleted."""


@app.command(
    epilog="Examples: distflow workflow rsync upload pytorch-dist-3 worker ./src:src  ·  "
    "distflow workflow rsync upload pytorch-dist-3 ./src/:/scratch/src --daemon"
)
def upload(
    workflow: WorkflowArgument,
    words: _PairArgument,
    timeout: _TimeoutOption = None,
    rate_limit: _RateOption = None,
    connect_timeout: _ConnectOption = 60,
    verbose: _VerboseOption = False,
    no_progress: _QuietOption = False,
    daemon: Annotated[
        bool, typer.Option("--daemon", help="Go on in the background: copy what changes, until the task has ended.")
    ] = False,
    poll_interval: Annotated[
        float | None,
        typer.Option("--poll-interval", metavar="SECONDS", min=0.1, help="With --daemon: between two looks at the files (1)."),
    ] = None,
    debounce_delay: Annotated[
        float | None,
        typer.Option("--debounce-delay", metavar="SECONDS", min=0, help="With --daemon: rest after the last change (1)."),
    ] = None,
    reconcile_interval: Annotated[
        float | None,
        typer.Option("--reconcile-interval", metavar="SECONDS", min=1, help="With --daemon: copy at least so often (60)."),
    ] = None,
    max_log_size: Annotated[
        int | None,
        typer.Option("--max-log-size", metavar="BYTES", min=1024, help="With --daemon: begin a new log after so much (2 MiB)."),
    ] = None,
) -> None:
    r"""Copy LOCAL to REMOTE, given as LOCAL:REMOTE.

    A relative REMOTE begins at the task's working directory; {{output}} is its output. A directory keeps its name, and with a
    slash at its end its contents are copied. A colon in LOCAL is written \:. rsync is needed here and on the node.
    """
    task, pair = _parse(words)
    local, remote = split_local(pair)
    rhythm = {
        "--poll-interval": poll_interval, "--debounce-delay": debounce_delay, "--reconcile-interval": reconcile_interval,
        "--max-log-size": max_log_size,
    }  # fmt: skip
    if not daemon:
        if useless := [name for name, value in rhythm.items() if value is not None]:
            raise InputError(f"{useless[0]} is for --daemon: without it, files are copied once")
        options = rsync_options(timeout, rate_limit, verbose=verbose, progress=_progress(no_progress))
        _run(workflow, task, connect_timeout, [*options, "--", local, f"node:{remote}"])
        return
    program()
    directory, record, place = _find(workflow, task, connect_timeout)
    check_there(place, connect_timeout)
    sync = Sync(
        workflow=record.uuid, workflow_id=record.id, task=place.task, local=local, remote=remote,
        options=tuple(rsync_options(timeout, rate_limit, verbose=verbose, progress=False)),
        connect_timeout_s=connect_timeout,
        poll_s=_POLL_S if poll_interval is None else poll_interval,
        debounce_s=_DEBOUNCE_S if debounce_delay is None else debounce_delay,
        reconcile_s=_RECONCILE_S if reconcile_interval is None else reconcile_interval,
        max_log_size=_LOG_BYTES if max_log_size is None else max_log_size,
    )  # fmt: skip
    _tell(directory, start_sync(directory, sync))


@app.command(
    epilog="Examples: distflow workflow rsync download pytorch-dist-3 worker {{output}}/:results  ·  "
    "distflow workflow rsync download pytorch-dist-3 logs/train.txt:."
)
def download(
    workflow: WorkflowArgument,
    words: _PairArgument,
    timeout: _TimeoutOption = None,
    rate_limit: _RateOption = None,
    connect_timeout: _ConnectOption = 60,
    verbose: _VerboseOption = False,
    no_progress: _QuietOption = False,
) -> None:
    r"""Copy REMOTE into the directory LOCAL, given as REMOTE:LOCAL.

    A relative REMOTE begins at the task's working directory; {{output}} is its output. A directory keeps its name, and with a
    slash at its end its contents are copied. A colon in REMOTE is written \:. rsync is needed here and on the node.
    """
    task, pair = _parse(words)
    remote, local = split_pair(pair, "REMOTE:LOCAL")
    if os.path.lexists(local) and not os.path.isdir(local):
        raise InputError(f"{local} is no directory", hint="LOCAL is the directory that the files go to")
    options = rsync_options(timeout, rate_limit, verbose=verbose, progress=_progress(no_progress))
    _run(workflow, task, connect_timeout, [*options, "--", f"node:{there(remote)}", f"{here(local).rstrip('/')}/"])


@app.command(epilog="Example: distflow workflow rsync status")
def status(format_type: FormatOption = Format.TEXT) -> None:
    """Show what copies files to tasks in the background, or did so in the last days."""
    syncs = Syncs(reading_directory().syncs)
    found = syncs.list()
    if format_type is Format.JSON:
        print(json.dumps(syncs_json(syncs, found), indent=2))
    elif found:
        print(syncs_text(syncs, found), end="")
    else:
        print("Nothing copies files in the background.")


@app.command(epilog="Examples: distflow workflow rsync stop pytorch-dist-3  ·  distflow workflow rsync stop")
def stop(
    workflow: Annotated[
        str | None,
        typer.Argument(metavar="[ID]", help="Only of this workflow: its id or uuid.", autocompletion=complete_workflow),
    ] = None,
    task: Annotated[str | None, typer.Option("--task", metavar="NAME", help="Only of this task.")] = None,
    format_type: FormatOption = Format.TEXT,
) -> None:
    """End what copies files in the background: all of it, or that of a workflow. What was copied stays."""
    syncs = Syncs(reading_directory().syncs)
    running = [one for one in syncs.list() if syncs.is_running(one)]
    chosen = [one for one in running if workflow in (None, one.workflow_id, one.workflow) and task in (None, one.task)]
    if not chosen and (workflow is not None or task is not None):
        what = " ".join(word for word in (workflow, task) if word is not None)
        raise NotFound(f"nothing copies files to {what} in the background", hint="see: distflow workflow rsync status")
    for one in chosen:
        syncs.stop(one)
        if format_type is Format.TEXT:
            print(f"{one.workflow_id} {one.task}: stopped")
    if format_type is Format.JSON:
        names = {(one.workflow, one.task) for one in chosen}
        print(json.dumps(syncs_json(syncs, [one for one in syncs.list() if (one.workflow, one.task) in names]), indent=2))
    elif not chosen:
        print("Nothing copies files in the background.")


def split_local(pair: str) -> tuple[str, str]:
    """Return both paths of LOCAL:REMOTE as rsync takes them. Raises ``InputError``, also when there is no LOCAL."""
    local, remote = split_pair(pair, "LOCAL:REMOTE")
    if not os.path.lexists(local):
        raise InputError(f"there is no {local} here")
    return here(local), there(remote)


def rsync_beside(directory: StateDirectory, record: WorkflowRecord, local: str, remote: str) -> None:
    """Start copying to the lead of a workflow's first group, from when it runs. Raises as ``start_sync`` does."""
    sync = Sync(
        workflow=record.uuid, workflow_id=record.id, task=first_lead(record), local=local, remote=remote,
        options=tuple(rsync_options(None, None, verbose=False, progress=False)),
        poll_s=_POLL_S, debounce_s=_DEBOUNCE_S, reconcile_s=_RECONCILE_S, max_log_size=_LOG_BYTES,
    )  # fmt: skip
    _tell(directory, start_sync(directory, sync))


def _tell(directory: StateDirectory, sync: Sync) -> None:
    print(f"{sync.local} is copied to {sync.task} until it has ended; log: {Syncs(directory.syncs).log(sync)}", file=sys.stderr)


def _parse(words: Sequence[str]) -> tuple[str | None, str]:
    if len(words) > 2:
        raise InputError(f"one pair of paths is copied at a time; these are {len(words) - 1}", hint="name their directory")
    return (words[0] if len(words) == 2 else None), words[-1]


def _progress(no_progress: bool) -> bool:
    return not no_progress and sys.stdout.isatty()


def _find(workflow: str, task: str | None, connect_timeout: int) -> tuple[StateDirectory, WorkflowRecord, Place]:
    with open_workflow(workflow, tell_age=False) as (directory, store, record):
        ((group, one),) = choose_tasks(record, [task or first_lead(record)])
        return directory, record, find_place(directory, store, record, group, one, connect_timeout)


def _run(workflow: str, task: str | None, connect_timeout: int, words: Sequence[str]) -> None:
    program()
    directory, record, place = _find(workflow, task, connect_timeout)
    check_there(place, connect_timeout)
    environment = os.environ | {"DISTFLOW_STATE": str(directory.path)}
    command = rsync_command(record.uuid, place.task, connect_timeout, words)
    code = subprocess.run(command, check=False, cwd="/", env=environment).returncode
    if code:
        raise NodeError(place.node.name, meaning(code), hint="its own words stand above")
