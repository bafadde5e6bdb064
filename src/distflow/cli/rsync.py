"""``distflow workflow rsync``: rsync itself, to a running task, through the connection that distflow has to its node."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from distflow.backends.machines.sessions import Exit
from distflow.cli.beside import Place, find_place
from distflow.cli.reading import WorkflowArgument, choose_tasks, open_workflow
from distflow.errors import InputError, NodeError
from distflow.state.record import WorkflowRecord

__all__ = ["app", "split_pair"]

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, add_completion=False)

_INSTALL = "install it there, such as with `apt-get install rsync`"
_OUTPUT = "{{output}}"
_MEANINGS = {
    10: "the connection broke", 11: "a file could not be read or written", 12: "the connection broke", 20: "it was interrupted",
    23: "some files could not be copied", 24: "some files vanished while they were copied", 30: "nothing came for too long",
}  # fmt: skip

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
    "distflow workflow rsync upload pytorch-dist-3 ./src/:/scratch/src"
)
def upload(
    workflow: WorkflowArgument,
    words: _PairArgument,
    timeout: _TimeoutOption = None,
    rate_limit: _RateOption = None,
    connect_timeout: _ConnectOption = 60,
    verbose: _VerboseOption = False,
    no_progress: _QuietOption = False,
) -> None:
    r"""Copy LOCAL to REMOTE, given as LOCAL:REMOTE.

    A relative REMOTE begins at the task's working directory; {{output}} is its output. A directory keeps its name, and with a
    slash at its end its contents are copied. A colon in LOCAL is written \:. rsync is needed here and on the node.
    """
    task, pair = _parse(words)
    local, remote = split_pair(pair, "LOCAL:REMOTE")
    if not os.path.lexists(local):
        raise InputError(f"there is no {local} here")
    options = _options(timeout, rate_limit, verbose=verbose, no_progress=no_progress)
    _run(workflow, task, connect_timeout, [*options, "--", _here(local), f"node:{_there(remote)}"])


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
    options = _options(timeout, rate_limit, verbose=verbose, no_progress=no_progress)
    _run(workflow, task, connect_timeout, [*options, "--", f"node:{_there(remote)}", f"{_here(local).rstrip('/')}/"])


def split_pair(pair: str, form: str) -> tuple[str, str]:
    r"""Return the two paths of ``A:B``; ``\:`` is a colon of the first. Raises ``InputError``.

    >>> split_pair(r"a\:b/c:d:e", "LOCAL:REMOTE")
    ('a:b/c', 'd:e')
    """
    at = next((at for at, letter in enumerate(pair) if letter == ":" and pair[at - 1 : at] != "\\"), -1)
    first, second = pair[: max(at, 0)].replace("\\:", ":"), pair[at + 1 :]
    if at < 0 or not first or not second:
        raise InputError(f"{pair!r} is not of the form {form}", hint="write `.` for the present directory, or the task's own")
    return first, second.replace("\\:", ":")


def _parse(words: Sequence[str]) -> tuple[str | None, str]:
    if len(words) > 2:
        raise InputError(f"one pair of paths is copied at a time; these are {len(words) - 1}", hint="name their directory")
    return (words[0] if len(words) == 2 else None), words[-1]


def _options(timeout: int | None, rate_limit: int | None, *, verbose: bool, no_progress: bool) -> list[str]:
    options = ["--archive", "--no-owner", "--no-group", "--protect-args", "--partial"]
    if timeout is not None:
        options.append(f"--timeout={timeout}")
    if rate_limit is not None:
        options.append(f"--bwlimit={max(1, rate_limit // 1024)}")
    if verbose:
        options.append("--verbose")
    if not no_progress and sys.stdout.isatty():
        options.append("--info=progress2")
    return options


def _here(path: str) -> str:
    """Return a local path that rsync cannot take for one of another machine, and that names contents where it did so."""
    whole = os.path.abspath(path)
    return whole + ("/" if os.path.basename(path) in ("", ".", "..") and whole != "/" else "")


def _there(path: str) -> str:
    return f"../output{path.removeprefix(_OUTPUT)}" if path.startswith(_OUTPUT) else path


def _run(workflow: str, task: str | None, connect_timeout: int, words: Sequence[str]) -> None:
    program = shutil.which("rsync")
    if program is None:
        raise InputError("rsync is not found on this machine", hint=_INSTALL.replace(" there", ""))
    with open_workflow(workflow, tell_age=False) as (directory, store, record):
        ((group, one),) = choose_tasks(record, [task or _first_lead(record)])
        place = find_place(directory, store, record, group, one, connect_timeout)
        uuid, state = record.uuid, str(directory.path)
    _check(place, connect_timeout)
    # rsync itself splits what it is to use as its remote shell, with quotes as a shell has them.
    way = [sys.executable, "-m", "distflow.cli.rsyncway", uuid, one.name, str(connect_timeout)]
    shell = " ".join("'{}'".format(word.replace("'", "''")) for word in way)
    # All paths are absolute. Not here, where a file of the person's could be taken for a module of ours.
    environment = os.environ | {"DISTFLOW_STATE": state}
    code = subprocess.run([program, "-e", shell, *words], check=False, cwd="/", env=environment).returncode
    if code:
        meaning = f" ({_MEANINGS[code]})" if code in _MEANINGS else ""
        raise NodeError(place.node.name, f"rsync ended with code {code}{meaning}", hint="its own words stand above")


def _first_lead(record: WorkflowRecord) -> str:
    tasks = record.groups[0].tasks
    return next((one for one in tasks if one.lead), tasks[0]).name


def _check(place: Place, connect_timeout: int) -> None:
    """See whether the node has rsync. Raises ``NodeError``."""
    session = place.open(["rsync", "--version"], None, connect_timeout, is_plain=True)
    try:
        session.end_input()
        code = next(event.code for event in session.events() if isinstance(event, Exit))
    finally:
        session.close()
    if code:
        raise NodeError(place.node.name, "rsync is not found in the task's PATH there", hint=_INSTALL)
