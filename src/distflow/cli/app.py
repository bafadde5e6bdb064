"""The root of the command line, and its one error boundary.

Commands live in modules of their own and are imported when they are called, so that ``distflow --help`` costs little
more than the interpreter. Data goes to stdout, words go to stderr; exit codes are those of ``errors``.
"""

from __future__ import annotations

import errno
import os
import signal
import sys
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from types import MappingProxyType
from typing import Any, TextIO

import typer

from distflow.cli.lazy_groups import LazyGroup, commands
from distflow.errors import DistflowError, InputError, WorkflowEnded

__all__ = ["app", "main", "run", "spread_sets", "wants_json"]

_FULL, _BUG, _INTERRUPTED = 5, 70, 130

_SEARCH = ("--status", "-s", "--user", "-u", "--pool", "-p", "--priority")
_LISTS: Mapping[tuple[str, ...], tuple[str, ...]] = MappingProxyType(
    {
        ("workflow", "list"): (*_SEARCH, "--tags"),
        ("task", "list"): (*_SEARCH, "--node", "-n"),
        ("resource", "list"): ("--pool", "-p", "--platform"),
        ("workflow", "tag"): ("--workflow", "-w", "--add", "-a", "--remove", "-r"),
    }
)
"""Options that take one value or more, of commands without arguments."""

_PAIRS = ("--set", "--set-string", "--set-env", "--payload", "--payload-file")
"""Options that take one ``NAME=VALUE`` or more."""


_WITHOUT_SERVER = MappingProxyType(
    dict.fromkeys(("login", "logout", "token", "user"), "nobody signs in: nodes are reached as SSH reaches them")
    | {"app": "submit the file of the spec: distflow workflow submit FILE"}
    | {"config": "pools and nodes are in a file: distflow.yaml, or the one that DISTFLOW_CONFIG names"}
)
"""OSMO's commands that need its server, and what to do instead."""


class _Root(LazyGroup):
    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return a command as every group does; one that needs OSMO's server says why there is none."""
        if cmd_name in _WITHOUT_SERVER:
            raise InputError(f"`distflow {cmd_name}` does not exist: there is no server", hint=_WITHOUT_SERVER[cmd_name])
        return super().get_command(ctx, cmd_name)

    table = commands(
        {
            "workflow": ("distflow.cli.workflow.group:app", "Submit, watch and end workflows."),
            "task": ("distflow.cli.task:app", "Look at tasks across workflows."),
            "pool": ("distflow.cli.pool.pool:app", "Show the pools that workflows can run in, and check their nodes."),
            "resource": ("distflow.cli.pool.resource:app", "Show what the nodes have, and what is in use of it."),
            "train": ("distflow.cli.train:app", "Choose a training strategy, and measure how ranks communicate."),
            "data": ("distflow.cli.data.data:app", "Upload, download, list and delete data at URLs."),
            "dataset": ("distflow.cli.data.dataset:app", "Named, versioned collections of files."),
            "node": ("distflow.cli.node:app", "Look after what distflow keeps on the nodes."),
            "profile": ("distflow.cli.pool.profile:app", "Say which pool you mean when you name none."),
            "credential": ("distflow.cli.credential:app", "Keep secrets, and give them to tasks by name."),
            "schema": ("distflow.cli.schema:app", "Print the JSON Schema of workflow specs."),
            "version": ("distflow.cli.version:app", "Print distflow's version."),
        }
    )


app = typer.Typer(
    cls=_Root,
    name="distflow",
    help="Distributed training on machines that you can SSH to: one YAML file, one command, one gang.",
    epilog="First steps: distflow workflow submit workflow_specs/hello_world.yaml --wait",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def _root() -> None:
    pass


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line and exit with its code."""
    _open_streams()
    arguments = list(sys.argv[1:] if argv is None else argv)
    sys.exit(run(arguments))


def _open_streams() -> None:
    """Have three streams: a closed one leads nowhere, and what the encoding of our output has not is escaped, no error."""
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(number, True)
    os.close(number)
    sys.stdin = sys.stdin or open(0, closefd=False)
    sys.stdout = sys.stdout or open(1, "w", closefd=False)
    sys.stderr = sys.stderr or open(2, "w", closefd=False)
    reconfigure = getattr(sys.stdout, "reconfigure", None)
    if reconfigure is not None:
        reconfigure(errors="backslashreplace")


def run(arguments: list[str]) -> int:
    """Run one command and return its exit code; every error ends here."""
    code = _run(arguments)
    # Here and not at exit, where a closed pipe or a full disk could no longer be met.
    try:
        sys.stdout.flush()
    except OSError as error:
        _drop(sys.stdout)
        if not isinstance(error, BrokenPipeError):
            code = code or _foreign_error(error)
    try:
        sys.stderr.flush()
    except OSError:
        _drop(sys.stderr)
    return code


def _run(arguments: list[str]) -> int:
    try:
        if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
            signal.signal(signal.SIGINT, signal.default_int_handler)  # what ``entry`` took away while modules were imported
        result = app(args=spread_sets(arguments), prog_name="distflow", standalone_mode=False)
        return result if isinstance(result, int) else 0
    except DistflowError as error:
        _show_error(error, arguments)
        return error.exit_code
    except KeyboardInterrupt:
        return _INTERRUPTED
    except BrokenPipeError:
        # The reader (head, less) has seen enough.
        return 0
    except SystemExit as error:
        if isinstance(error.__context__, BrokenPipeError):
            return 0  # the same, which typer has met first
        raise
    except Exception as error:  # noqa: BLE001  the boundary: what is left is a usage error or a bug
        return _foreign_error(error)


def _drop(stream: TextIO) -> None:
    """Lead what is still buffered for a reader that has gone nowhere, instead of into a traceback at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def spread_sets(arguments: Sequence[str]) -> list[str]:
    """Return the arguments with ``--set a=1 b=2`` as ``--set a=1 --set b=2``: OSMO's form, which the parser does not know.

    The same for the options of commands that take no arguments beside them (``list -s RUNNING PENDING``).

    >>> spread_sets(["spec.yaml", "--set", "a=1", "b=2", "--dry-run"])
    ['spec.yaml', '--set', 'a=1', '--set', 'b=2', '--dry-run']
    """
    spread: list[str] = []
    flag: str | None = None
    given = False
    lists = _LISTS.get(tuple(arguments[:2]), ())
    for argument in arguments:
        if argument in _PAIRS or argument in lists:
            flag, given = argument, False
            continue
        if flag is not None and not argument.startswith("-") and (not given or "=" in argument or flag in lists):
            spread += [flag, argument]
            given = True
            continue
        if flag is not None and not given:
            spread.append(flag)
        flag = None
        spread.append(argument)
    if flag is not None and not given:
        spread.append(flag)
    return spread


def _show_error(error: DistflowError, arguments: Sequence[str]) -> None:
    if isinstance(error, WorkflowEnded) and not error.message:
        return
    if wants_json(arguments):
        import json

        body = {"message": error.message, "hint": error.hint, "code": error.exit_code}
        problems = getattr(error, "problems", None)
        if problems is not None:
            body["problems"] = [problem.as_json() for problem in problems]
        with suppress(OSError):  # what could not be written now is met again by the last flush
            print(json.dumps({"error": body}, indent=2))
    prefix = "" if hasattr(error, "problems") else "error: "
    _say(f"{prefix}{error}")


def _say(text: str) -> None:
    """Tell of an error. Where nobody can be told, the exit code still says it."""
    from distflow.documents.printable import plain_lines

    with suppress(OSError):
        print(plain_lines(text), file=sys.stderr)  # it quotes specs, nodes and stores


def wants_json(arguments: Sequence[str]) -> bool:
    """Return whether the caller asked for JSON, so that errors come as JSON too."""
    flags, joined = {"--format-type", "-t"}, {"--format-type=json", "-tjson"}
    if "logs" in arguments[:2] or "events" in arguments[:2]:
        # There, -t means a task, as OSMO has it.
        flags, joined = {"--format-type"}, {"--format-type=json"}
    return not joined.isdisjoint(arguments) or any(flag in flags and value == "json" for flag, value in pairwise(arguments))


def _foreign_error(error: Exception) -> int:
    show = getattr(error, "format_message", None)
    if show is not None:
        # The parser's own errors: wrong options, missing arguments.
        context = getattr(error, "ctx", None)
        if context is not None:
            _say(context.get_usage())
        _say(f"error: {show()}")
        return 2
    if isinstance(error, UnicodeEncodeError) and error.encoding == "utf-8":
        # Arguments may be any bytes; what is kept and sent is text. Which it is, is not said: it may be a secret.
        _say("error: an argument, or the name of a file, is not UTF-8")
        return 2
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        _say(f"error: {error.filename or 'what the output is written to'}: {error.strerror}; free some space and try again")
        return _FULL
    code = getattr(error, "exit_code", None)
    if isinstance(code, int):
        return code
    from distflow.client.client import state_directory_of

    path = state_directory_of(os.environ).crash_log
    text = traceback.format_exc()
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        path.write_text(text, encoding="utf-8", errors="backslashreplace")
        _say(f"error: a bug in distflow: {error!r}\nthe traceback is in {path}; please report it")
    except OSError:
        _say(f"error: a bug in distflow:\n{text}")
    return _BUG
