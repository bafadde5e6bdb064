"""The root of the command line, which handles the errors of all commands.

The module of a command is imported when the command is called. This keeps ``distflow --help`` fast. Results go
to standard output, and messages go to standard error. ``distflow.errors`` lists the exit codes of errors. Ctrl-C gives 130.
"""

from __future__ import annotations

import errno
import os
import signal
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from types import MappingProxyType
from typing import Any, TextIO, cast

import typer

from distflow.cli.options import ALIASES, LazyGroup, commands
from distflow.errors import DistflowError, InputError, WorkflowEnded

__all__ = ["app", "main", "repeat_options", "run", "wants_json"]

_DISK_FULL, _BUG, _INTERRUPTED = 5, 70, 130
"""Exit codes of errors that are not a ``DistflowError``."""

_SEARCH = ("--status", "-s", "--user", "-u", "--pool", "-p", "--priority")
_LISTS: Mapping[tuple[str, ...], tuple[str, ...]] = MappingProxyType(
    {
        ("workflow", "list"): (*_SEARCH, "--tags"),
        ("task", "list"): (*_SEARCH, "--node", "-n"),
        ("resource", "list"): ("--pool", "-p", "--platform"),
        ("workflow", "tag"): ("--workflow", "-w", "--add", "-a", "--remove", "-r"),
    }
)
"""Options that take one or more values, for commands that have no positional arguments."""

_PAIRS = ("--set", "--set-string", "--set-env", "--payload", "--payload-file")
"""Options that take one or more ``NAME=VALUE`` pairs."""


_WITHOUT_SERVER = MappingProxyType(
    dict.fromkeys(("login", "logout", "token", "user"), "there is no sign-in: distflow uses your SSH keys or your kubeconfig")
    | {"app": "submit a spec: distflow workflow submit FILE"}
    | {"config": "pools and nodes are configured in distflow.yaml, or in the file that DISTFLOW_CONFIG names"}
)
"""Commands of OSMO that need its server, each with a hint about the alternative."""


_SHORTCUTS = MappingProxyType(
    {
        "submit": "submit",
        "validate": "validate",
        "status": ALIASES["status"],
        "logs": "logs",
        "list": "list",
        "stop": ALIASES["stop"],
        "fetch": "fetch",
    }
)
"""Shortcuts for commands of ``distflow workflow``."""


class _Root(LazyGroup):
    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return a command, or ``None``. Raise ``InputError`` for a command of OSMO that needs its server."""
        if cmd_name in _SHORTCUTS:
            return super().get_command(ctx, "workflow").get_command(ctx, _SHORTCUTS[cmd_name])
        if cmd_name in _WITHOUT_SERVER:
            raise InputError(
                f"`distflow {cmd_name}` does not exist, because distflow has no server", hint=_WITHOUT_SERVER[cmd_name]
            )
        return super().get_command(ctx, cmd_name)

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names of the commands and the shortcuts, for shell completion."""
        return [*super().list_commands(ctx), *_SHORTCUTS]

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the commands and the shortcuts to the help page."""
        super().format_commands(ctx, formatter)
        with formatter.section("Shortcuts"):
            formatter.write_dl(
                [(f"{name:10}", f"Same as `distflow workflow {target}`.") for name, target in _SHORTCUTS.items()]
            )

    table = commands(
        {
            "Run and watch": {
                "run": ("distflow.cli.run:run_app", "Run a script or command on nodes, without a spec."),
                "init": ("distflow.cli.init:init_app", "Write a spec, or translate an sbatch script or a torchrun command."),
                "workflow": ("distflow.cli.workflow.commands:app", "Submit, watch and cancel workflows."),
                "top": ("distflow.cli.top:app", "Show unfinished workflows and the GPUs of the pools, live."),
                "task": ("distflow.cli.task:app", "List the tasks of all workflows."),
                "ui": ("distflow.cli.ui.command:app", "Show workflows and nodes on a local web page."),
            },
            "Nodes": {
                "pool": ("distflow.cli.pool:pool_app", "List pools, and check their nodes."),
                "resource": ("distflow.cli.pool:resource_app", "Show the total and used resources of nodes."),
                "node": ("distflow.cli.node:app", "Remove leftover processes and files from nodes."),
                "train": ("distflow.cli.train:app", "Choose a training strategy, and measure communication or training speed."),
            },
            "Files": {
                "data": ("distflow.cli.data:app", "Upload, download, list and delete data at URLs."),
                "dataset": ("distflow.cli.dataset:app", "Manage named, versioned collections of files."),
            },
            "Manage": {
                "profile": ("distflow.cli.pool:profile_app", "Set your default pool and notifications."),
                "credential": ("distflow.cli.credential:app", "Store secrets that tasks use by name."),
                "notify": ("distflow.cli.notify:app", "List and test notifications about workflows."),
                "schema": ("distflow.cli.about:schema_app", "Print the JSON Schema of workflow specs."),
                "version": ("distflow.cli.about:version_app", "Print distflow's version."),
            },
        }
    )


app = typer.Typer(
    cls=_Root,
    name="distflow",
    help="Run distributed training on SSH machines, Slurm, Kubernetes and Ray: one YAML file, one command.",
    epilog="Example: distflow init --sample hello-world && distflow submit hello_world.yaml --wait",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": sys.maxsize},
)


@app.callback()
def _root() -> None:
    pass


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line and exit the process with the command's exit code.

    Args:
        argv: The arguments without the program's name. Default: ``sys.argv[1:]``.

    """
    _open_streams()
    if os.environ.get("_DISTFLOW_COMPLETE", "").startswith("complete"):
        # A shell requests completions. Errors would disturb its prompt, and typer would use rich to remove markup from help.
        sys.stderr = open(os.devnull, "w")
        sys.modules["rich"] = cast("Any", None)  # with this entry, imports of rich fail
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] in (["--install-completion"], ["--show-completion"]):
        from distflow.cli.completion import repair_zsh_script

        repair_zsh_script()
    sys.exit(run(arguments))


def _open_streams() -> None:
    """Connect closed standard streams to /dev/null.

    Make stdout escape characters that its encoding does not support, and name `standard output` in errors of writing to it.
    Make stdin accept any bytes, because the check of a spec reports those that are not UTF-8.
    """
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(number, True)
    os.close(number)
    sys.stdin = sys.stdin or open(0, closefd=False)
    sys.stdout = sys.stdout or open(1, "w", closefd=False)
    sys.stderr = sys.stderr or open(2, "w", closefd=False)
    for stream, errors in ((sys.stdin, "surrogateescape"), (sys.stdout, "backslashreplace")):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors=errors)
    for name in ("write", "flush"):
        setattr(sys.stdout, name, _with_name(getattr(sys.stdout, name)))


def _with_name(function: Callable[..., int | None]) -> Callable[..., int | None]:
    """Return a method of stdout whose errors contain the name of the stream, like errors of opened files."""

    def call(*arguments: str) -> int | None:
        try:
            return function(*arguments)
        except OSError as error:
            error.filename = "standard output"
            raise

    return call


def run(arguments: list[str]) -> int:
    """Run one command and return its exit code. All errors except ``SystemExit`` are handled here."""
    code = _run(_expand(arguments))
    # Flush here, because at exit a closed pipe or a full disk could no longer be handled.
    try:
        sys.stdout.flush()
    except OSError as error:
        _discard_output(sys.stdout)
        if not isinstance(error, BrokenPipeError):
            code = code or _handle_other_error(error)
    try:
        sys.stderr.flush()
    except OSError:
        _discard_output(sys.stderr)
    return code


def _run(arguments: list[str]) -> int:
    try:
        if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
            signal.signal(signal.SIGINT, signal.default_int_handler)  # restore the handler that ``entry`` removed
        result = app(args=repeat_options(arguments), prog_name="distflow", standalone_mode=False)
        return result if isinstance(result, int) else 0
    except DistflowError as error:
        _show_error(error, arguments)
        return error.exit_code
    except KeyboardInterrupt:
        return _INTERRUPTED
    except BrokenPipeError:
        # The reader of the output (head, less) has exited.
        return 0
    except SystemExit as error:
        if isinstance(error.__context__, BrokenPipeError):
            return 0  # typer has converted a BrokenPipeError
        raise
    except Exception as error:  # noqa: BLE001  any other error is a usage error or a bug
        return _handle_other_error(error, arguments)


def _expand(arguments: Sequence[str]) -> list[str]:
    """Replace a shortcut, an alias of a ``workflow`` command, or ``--version`` at the start of the arguments with its command.

    >>> _expand(["stop", "train-3"])
    ['workflow', 'cancel', 'train-3']
    """
    match arguments:
        case [("--version" | "-V"), *rest]:
            return ["version", *rest]
        case ["workflow", alias, *rest] if alias in ALIASES:
            return ["workflow", ALIASES[alias], *rest]
        case [shortcut, *rest] if shortcut in _SHORTCUTS:
            return ["workflow", _SHORTCUTS[shortcut], *rest]
        case _:
            return list(arguments)


def _discard_output(stream: TextIO) -> None:
    """Connect a stream to /dev/null, so writing its buffered output at exit cannot fail with a traceback."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def repeat_options(arguments: Sequence[str]) -> list[str]:
    """Return the arguments with ``--set a=1 b=2`` rewritten as ``--set a=1 --set b=2``, because typer does not parse this form.

    OSMO accepts several values after one option. This function rewrites the options in ``_PAIRS`` and, for commands
    without positional arguments, those in ``_LISTS``, as in ``list -s RUNNING PENDING``.

    >>> repeat_options(["spec.yaml", "--set", "a=1", "b=2", "--dry-run"])
    ['spec.yaml', '--set', 'a=1', '--set', 'b=2', '--dry-run']
    """
    spread: list[str] = []
    flag: str | None = None
    has_value = False
    lists = _LISTS.get(tuple(arguments[:2]), ())
    end = arguments.index("--") if "--" in arguments else len(arguments)
    for argument in arguments[:end]:
        if argument in _PAIRS or argument in lists:
            flag, has_value = argument, False
            continue
        if flag is not None and not argument.startswith("-") and (not has_value or "=" in argument or flag in lists):
            spread += [flag, argument]
            has_value = True
            continue
        if flag is not None and not has_value:
            spread.append(flag)
        flag = None
        spread.append(argument)
    if flag is not None and not has_value:
        spread.append(flag)
    return [*spread, *arguments[end:]]


def _show_error(error: DistflowError, arguments: Sequence[str]) -> None:
    if isinstance(error, WorkflowEnded) and not error.message:
        return
    if wants_json(arguments):
        import json

        body = {"message": error.message, "hint": error.hint, "code": error.exit_code}
        problems = getattr(error, "problems", None)
        if problems is not None:
            body["problems"] = [problem.as_json() for problem in problems]
        with suppress(OSError):  # the final flush in ``run`` handles the error
            print(json.dumps({"error": body}, indent=2))
    prefix = "" if hasattr(error, "problems") else "error: "
    _print_error(f"{prefix}{error}")


def _print_error(text: str) -> None:
    """Print an error to standard error. If this fails, the exit code still reports it."""
    from distflow.cli.render.tables import print_notice

    with suppress(OSError):
        print_notice(text)


def wants_json(arguments: Sequence[str]) -> bool:
    """Return whether the arguments request JSON output, so errors are printed as JSON, too."""
    if "--" in arguments:
        arguments = arguments[: arguments.index("--")]  # the rest is a command of the user
    flags, joined = {"--format-type", "-t"}, {"--format-type=json", "-tjson"}
    if "logs" in arguments[:2] or "events" in arguments[:2]:
        # In these commands, -t means --task, as in OSMO.
        flags, joined = {"--format-type"}, {"--format-type=json"}
    return not joined.isdisjoint(arguments) or any(flag in flags and value == "json" for flag, value in pairwise(arguments))


def _handle_other_error(error: Exception, arguments: Sequence[str] = ()) -> int:
    """Print an error that is not a ``DistflowError``, and return the exit code."""
    if hasattr(error, "format_message"):
        from distflow.cli.usage import explain_usage_error, help_page

        page = help_page(error)
        if page is not None:
            from distflow.documents.text import plain_lines

            print(page if sys.stderr.isatty() else plain_lines(page), file=sys.stderr)
            return InputError.exit_code
        usage_error = explain_usage_error(error, typer.main.get_command(app), arguments)
        _show_error(usage_error, arguments)
        return usage_error.exit_code
    if isinstance(error, UnicodeEncodeError) and error.encoding == "utf-8":
        # Arguments can be any bytes, but distflow stores and sends text. Do not print the argument: it can be a secret.
        problem = "an argument or the name of a file is not valid UTF-8"
        _print_error(f"error: {problem}\nrename the file, or write the argument in UTF-8")
        return 2
    from distflow.client.client import state_directory_of

    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        # Only temporary files and files of the state directory are written without error handling of their own.
        unnamed = f"{state_directory_of(os.environ).path} or the directory for temporary files (TMPDIR)"
        where = error.filename2 or error.filename or unnamed
        _print_error(f"error: {where}: {error.strerror}; free some space and try again")
        return _DISK_FULL
    code = getattr(error, "exit_code", None)
    if isinstance(code, int):
        return code
    path = state_directory_of(os.environ).crash_log
    text = traceback.format_exc()
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        path.write_text(text, encoding="utf-8", errors="backslashreplace")
        _print_error(f"error: a bug in distflow: {error!r}\nPlease report it with the traceback in {path}.")
    except OSError:
        problem = f"error: a bug in distflow: {error!r}"
        _print_error(f"{problem}\nPlease report it with this traceback, which could not be written to {path}:\n{text}")
    return _BUG
