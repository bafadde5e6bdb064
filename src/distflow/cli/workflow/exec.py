"""Connect to running tasks: ``distflow workflow exec`` and ``port-forward``."""

from __future__ import annotations

import os
import shlex
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Annotated

import typer

from distflow.cli.completion import complete_group, complete_task
from distflow.cli.context import WorkflowArgument, open_client, open_workflow
from distflow.cli.options import ConnectTimeoutOption, command_app
from distflow.cli.render.tables import Paint, print_notice
from distflow.cli.render.terminal import raw_terminal, read_size
from distflow.client.running_tasks import (
    Exit,
    ForwardedPort,
    RunningTask,
    Session,
    Size,
    find_running_task,
    forward_ports,
    run_on_tasks,
    running_task,
)
from distflow.client.workflows import choose_tasks, group_of, pause
from distflow.documents.text import plain, plain_lines
from distflow.errors import AuthenticationRefused, HostKeyMismatch, HostKeyUnknown, InputError, NodeUnreachable

__all__ = ["exec_app", "parse_ports", "port_forward_app"]


exec_app = command_app()

_SHELL = "/bin/bash"
_READ_SIZE = 65536
_RECONNECT_S = 1.0


@exec_app.command(
    "exec",
    epilog="Examples: distflow workflow exec pytorch-dist-3 worker  ·  "
    "distflow workflow exec pytorch-dist-3 --group training --entry nvidia-smi",
)
def execute(
    workflow: WorkflowArgument,
    task: Annotated[
        str | None,
        typer.Argument(metavar="[TASK]", help="The task alongside which the command runs.", autocompletion=complete_task),
    ] = None,
    group: Annotated[
        str | None,
        typer.Option(
            "--group",
            metavar="GROUP",
            help="Run on every task of this group instead, without a terminal.",
            autocompletion=complete_group,
        ),
    ] = None,
    entry: Annotated[
        str | None, typer.Option("--entry", metavar="COMMAND", help=f"The command to run, in quotes. Default: {_SHELL}.")
    ] = None,
    connect_timeout: ConnectTimeoutOption = 60,
    keep_alive: Annotated[
        bool, typer.Option("--keep-alive", help="If the connection breaks, connect again and restart the command.")
    ] = False,
) -> None:
    """Run a command alongside a running task.

    It runs on the task's node, in the task's directory, with its environment (including secrets) and its GPUs. In a terminal,
    the command gets a terminal, too; otherwise, or with --group, it gets pipes. The exit code is that of the command, or the
    highest with --group. The command and its child processes are killed when the connection closes or the task ends.
    """
    argv = _parse(entry if entry is not None else _SHELL)
    if (task is None) == (group is None):
        raise InputError("name either a task, or a group with --group")
    if group is not None and keep_alive:
        raise InputError("--keep-alive cannot be combined with --group")
    if group is not None and entry is None:
        raise InputError("--group needs a command, because it has no terminal for a shell", hint="use --entry COMMAND")
    with open_workflow(workflow, report_age=False) as (client, record):
        if task is not None:
            chosen = choose_tasks(record, [task])
        else:
            chosen = [(group or "", one) for one in group_of(record, group or "").tasks]
        found = [running_task(client, record, name, one, connect_timeout) for name, one in chosen]
    if task is None:
        raise typer.Exit(_run_on_all(found, argv, connect_timeout))

    def find_again() -> RunningTask:
        with open_client() as client:
            return find_running_task(client, record.uuid, task, connect_timeout)

    raise typer.Exit(_run_on_one(found[0], argv, connect_timeout, find_again if keep_alive else None))


def _parse(entry: str) -> list[str]:
    try:
        argv = shlex.split(entry)
    except ValueError as error:
        raise InputError(f"--entry `{entry}`: {error}") from None
    if not argv:
        raise InputError("--entry is empty", hint="give a command, such as `--entry bash`")
    return argv


def _run_on_one(
    task: RunningTask, argv: Sequence[str], connect_timeout: int, find_again: Callable[[], RunningTask] | None
) -> int:
    """Run the command alongside one task, and return its exit code.

    If an open connection breaks, ``find_again`` looks up the task for a new connection. If ``find_again`` is ``None`` or fails,
    if the first connection fails, or if the host key or the login is refused, the error is raised.
    """
    keyboard = _Keyboard()
    while True:
        try:
            return _run_once(task, argv, connect_timeout, keyboard)
        except (HostKeyUnknown, HostKeyMismatch, AuthenticationRefused):
            raise
        except NodeUnreachable as error:
            if find_again is None or not keyboard.had_session:
                raise
            keyboard.detach()
            print(f"{plain_lines(str(error))}; connecting again (Ctrl-C to stop)", file=sys.stderr)
        pause(_RECONNECT_S)
        task = find_again()


def _run_once(task: RunningTask, argv: Sequence[str], connect_timeout: int, keyboard: _Keyboard) -> int:
    has_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    if not has_terminal:
        session = task.open(argv, None, connect_timeout)
        try:
            keyboard.attach(session)
            return _forward_output(session)
        finally:
            session.close()
    fd = sys.stdin.fileno()
    rows, columns = read_size(fd)
    session = task.open(argv, (Size(rows=rows, columns=columns), os.environ.get("TERM", "")), connect_timeout)
    try:
        with raw_terminal(fd, lambda rows, columns: session.resize(Size(rows=rows, columns=columns))):
            keyboard.attach(session)
            return _forward_output(session)
    finally:
        session.close()


def _forward_output(session: Session) -> int:
    """Forward the command's output until it ends, and return its exit code."""
    for event in session.events():
        if isinstance(event, Exit):
            if event.why:
                print(f"\r\n{plain(event.why)}\r", file=sys.stderr)
            return event.code
        is_error, data = event
        _write(2 if is_error else 1, data)
    raise AssertionError("the session ended without an `Exit` event")


class _Keyboard:
    """Forwards standard input to the current session. Input that arrives between two sessions goes to the next one."""

    def __init__(self) -> None:
        self._session: Session | None = None
        self._is_attached = threading.Event()

    @property
    def had_session(self) -> bool:
        """Whether there has been a session."""
        return self._session is not None

    def attach(self, session: Session) -> None:
        """Forward all further input to ``session``."""
        is_first, self._session = self._session is None, session
        self._is_attached.set()
        if is_first:
            threading.Thread(target=self._read, name="input", daemon=True).start()

    def detach(self) -> None:
        """Keep further input for the next session."""
        self._is_attached.clear()

    def _read(self) -> None:
        while True:
            try:
                data = os.read(0, _READ_SIZE)
            except OSError:
                data = b""
            self._is_attached.wait()
            if self._session is None:
                continue
            if data:
                self._session.write(data)
            else:
                self._session.end_input()
                self._is_attached.clear()  # wait for the next session, and end its input, too


def _write(fd: int, data: bytes) -> None:
    view = memoryview(data)
    try:
        while view:
            view = view[os.write(fd, view) :]
    except OSError as error:
        error.filename = "standard output" if fd == 1 else "standard error"
        raise


class _PrefixedOutput:
    """Prints the output of several tasks in whole lines, each with its task's name as a prefix."""

    def __init__(self) -> None:
        self._paint, self._lock = Paint.of(sys.stdout), threading.Lock()
        self._partial_lines: dict[tuple[str, bool], bytes] = {}

    def add(self, number: int, task: str, is_error: bool, data: bytes, *, is_last: bool = False) -> None:
        """Print the lines that ``data`` completes. With ``is_last``, also print an incomplete last line, and end it."""
        *lines, rest = (self._partial_lines.get((task, is_error), b"") + data).split(b"\n")
        self._partial_lines[task, is_error] = b"" if is_last else rest
        prefix = f"{self._paint.task(f'[{task}]', number)} ".encode()
        with self._lock:
            _write(
                2 if is_error else 1,
                b"".join(prefix + line + b"\n" for line in [*lines, *([rest] if is_last and rest else [])]),
            )


def _run_on_all(tasks: Sequence[RunningTask], argv: Sequence[str], connect_timeout: int) -> int:
    """Run the command alongside every task, and return the highest exit code. Raises the first error, and prints the others."""
    shown = _PrefixedOutput()

    def show_output(number: int, is_error: bool, data: bytes) -> None:
        shown.add(number, tasks[number].task, is_error, data)

    def show_exit(number: int, end: Exit) -> None:
        for is_error, words in ((False, ""), (True, end.why)):
            shown.add(number, tasks[number].task, is_error, words.encode(), is_last=True)

    ended = run_on_tasks(tasks, argv, connect_timeout, on_output=show_output, on_exit=show_exit)
    for error in ended.errors[1:]:
        print_notice(f"error: {error}")
    if ended.errors:
        raise ended.errors[0]
    return max(ended.codes)


port_forward_app = command_app()

_MAX_PORTS = 30


@port_forward_app.command(
    "port-forward",
    epilog="Examples: distflow workflow port-forward pytorch-dist-3 master --port 6006  ·  "
    "distflow workflow port-forward pytorch-dist-3 master --port 8080:80,9000-9003",
)
def port_forward(
    workflow: WorkflowArgument,
    task: Annotated[
        str, typer.Argument(metavar="TASK", help="The task on whose node the programs listen.", autocompletion=complete_task)
    ],
    port: Annotated[
        str,
        typer.Option(
            "--port", metavar="LOCAL[:REMOTE],…", help="Local ports and ports of the node, such as 8080:80,9000-9003."
        ),
    ],
    host: Annotated[str, typer.Option("--host", help="The local address to listen on.")] = "localhost",
    connect_timeout: ConnectTimeoutOption = 60,
) -> None:
    """Forward local TCP ports to the node of a running task.

    Forwarding stops with Ctrl-C or when the task ends. It also reaches programs that listen only on the node's loopback
    address. The ports belong to the whole node, so it reaches programs of other tasks, too.
    """
    pairs = parse_ports(port)
    with open_workflow(workflow, report_age=False) as (client, record):
        forward_ports(client, record, task, pairs, host=host, connect_timeout=connect_timeout, on_ready=_print_ready)


def _print_ready(port: ForwardedPort) -> None:
    words = f"{port.host}:{port.local} is forwarded to port {port.remote} of {port.node} (Ctrl-C to stop)"
    print(words, file=sys.stderr, flush=True)


def parse_ports(text: str) -> list[tuple[int, int]]:
    """Parse ``--port`` into pairs of a local port and a port of the node. Raises ``InputError`` if it is not valid.

    >>> parse_ports("8080:80,9000-9001")
    [(8080, 80), (9000, 9000), (9001, 9001)]
    """
    pairs: list[tuple[int, int]] = []
    for part in text.split(","):
        first, colon, second = part.partition(":")
        local, remote = _range(first, text), _range(second if colon else first, text)
        if len(local) != len(remote):
            raise InputError(f"--port {part}: the local and remote ranges differ in length: {len(local)} and {len(remote)}")
        pairs += zip(local, remote, strict=True)
    if len(pairs) > _MAX_PORTS:
        raise InputError(f"--port has {len(pairs)} ports, and at most {_MAX_PORTS} can be forwarded")
    if len({local_port for local_port, _ in pairs}) < len(pairs):
        raise InputError(f"--port {text} names a local port twice", hint="give each local port once: LOCAL:REMOTE,…")
    return pairs


def _range(text: str, whole: str) -> range:
    first, dash, last = text.partition("-")
    words = (first, last) if dash else (first, first)
    if not all(word.isascii() and word.isdigit() and 1 <= int(word) <= 65535 for word in words):
        raise InputError(
            f"--port {whole}: `{text}` is not a port from 1 to 65535" if text else f"--port {whole}: a port is missing",
            hint="use LOCAL or LOCAL:REMOTE, such as 8080:80, or a range such as 8000-8003",
        )
    if dash and int(first) >= int(last):
        raise InputError(
            f"--port {whole}: the last port of the range `{text}` is not larger than its first port",
            hint="write the smaller port first, or a single port",
        )
    return range(int(words[0]), int(words[1]) + 1)
