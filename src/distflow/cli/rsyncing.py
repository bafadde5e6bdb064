"""What every call of rsync has in common: its options, its paths, and distflow's connection as its remote shell."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from distflow.backends.machines.inspection.session import Exit
from distflow.cli.beside import Place
from distflow.errors import InputError, NodeError
from distflow.plan.tokens import KNOWN_PLACES
from distflow.state.record import WorkflowRecord

__all__ = ["check_there", "first_lead", "here", "meaning", "program", "rsync_command", "rsync_options", "split_pair", "there"]

_INSTALL = "install it there, such as with `apt-get install rsync`"
_OUTPUT = "{{output}}"
_PLACES: Mapping[str, str] = MappingProxyType(
    {_OUTPUT: "../output"} | {path: f"../{ours}" for path, ours in KNOWN_PLACES.items()}
)
"""What a remote path may begin with, and where that is from the task's working directory."""
_MEANINGS: Mapping[int, str] = MappingProxyType(
    {
        10: "the connection broke", 11: "a file could not be read or written", 12: "the connection broke",
        20: "it was interrupted", 23: "some files could not be copied", 24: "some files vanished while they were copied",
        30: "nothing came for too long",
    }
)  # fmt: skip


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


def rsync_options(timeout: int | None, rate_limit: int | None, *, verbose: bool, progress: bool) -> list[str]:
    """Return rsync's options: ``timeout`` in seconds, ``rate_limit`` in bytes a second."""
    options = ["--archive", "--no-owner", "--no-group", "--protect-args", "--partial"]
    if timeout is not None:
        options.append(f"--timeout={timeout}")
    if rate_limit is not None:
        options.append(f"--bwlimit={max(1, rate_limit // 1024)}")
    if verbose:
        options.append("--verbose")
    if progress:
        options.append("--info=progress2")
    return options


def here(path: str) -> str:
    """Return a local path that rsync cannot take for one of another machine, and that names contents where it did so."""
    whole = os.path.abspath(path)
    return whole + ("/" if os.path.basename(path) in ("", ".", "..") and whole != "/" else "")


def there(path: str) -> str:
    """Return a remote path as rsync meets it in the task's working directory: its output, and what OSMO's containers have.

    >>> there("{{output}}/logs"), there("/osmo/run/workspace/src/"), there("src"), there("/scratch")
    ('../output/logs', '../work/src/', 'src', '/scratch')
    """
    for theirs, ours in _PLACES.items():
        if path == theirs or path.startswith(f"{theirs}/"):
            return f"{ours}{path.removeprefix(theirs)}"
    return path


def program() -> str:
    """Return where rsync is on this machine. Raises ``InputError``."""
    found = shutil.which("rsync")
    if found is None:
        raise InputError("rsync is not found on this machine", hint=_INSTALL.replace(" there", ""))
    return found


def rsync_command(workflow: str, task: str, connect_timeout: int, words: Sequence[str]) -> list[str]:
    """Return the command that copies to or from a task; ``words``: its options and paths, of which all here are absolute.

    To be run in ``/``, where no file of the person's can be taken for a module of ours. Raises ``InputError``.
    """
    # rsync itself splits what it is to use as its remote shell, with quotes as a shell has them.
    way = [sys.executable, "-m", "distflow.cli.rsyncway", workflow, task, str(connect_timeout)]
    shell = " ".join("'{}'".format(word.replace("'", "''")) for word in way)
    return [program(), "-e", shell, *words]


def meaning(code: int) -> str:
    """Return what happened when rsync ended with a code other than 0.

    >>> meaning(23), meaning(5)
    ('rsync ended with code 23 (some files could not be copied)', 'rsync ended with code 5')
    """
    return f"rsync ended with code {code}" + (f" ({_MEANINGS[code]})" if code in _MEANINGS else "")


def first_lead(record: WorkflowRecord) -> str:
    """Return the task that is meant when none is named."""
    tasks = record.groups[0].tasks
    return next((one for one in tasks if one.lead), tasks[0]).name


def check_there(place: Place, connect_timeout: int) -> None:
    """See whether the node has rsync. Raises ``NodeError``."""
    session = place.open(["rsync", "--version"], None, connect_timeout, is_plain=True)
    try:
        session.end_input()
        code = next(event.code for event in session.events() if isinstance(event, Exit))
    finally:
        session.close()
    if code:
        raise NodeError(place.node.name, "rsync is not found in the task's PATH there", hint=_INSTALL)
