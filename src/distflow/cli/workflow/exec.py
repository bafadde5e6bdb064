"""``distflow workflow exec``."""

from __future__ import annotations

import os
import shlex
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Annotated

import typer

from distflow.cli.opening import WorkflowArgument, open_client, open_workflow
from distflow.cli.options import command_app
from distflow.cli.render.raw_terminal import raw_terminal, read_size
from distflow.cli.render.tables import Paint
from distflow.client.running_tasks import Exit, RunningTask, Session, Size, find_running_task, run_on_tasks, running_task
from distflow.client.workflows import choose_tasks, group_of, pause
from distflow.documents.printable import plain, plain_lines
from distflow.errors import AuthenticationRefused, HostKeyMismatch, HostKeyUnknown, InputError, NodeUnreachable

__all__ = ["app"]

app = command_app()

_SHELL = "/bin/bash"
_READ = 65536
_AGAIN_S = 1.0


@app.command(
    "exec",
    epilog="Examples: distflow workflow exec pytorch-dist-3 worker  ·  "
    "distflow workflow exec pytorch-dist-3 --group training --entry nvidia-smi",
)
def execute(
    workflow: WorkflowArgument,
    task: Annotated[str | None, typer.Argument(metavar="[TASK]", help="The task beside which it runs.")] = None,
    group: Annotated[
        str | None, typer.Option("--group", metavar="GROUP", help="Every task of this group instead, without a terminal.")
    ] = None,
    entry: Annotated[
        str | None, typer.Option("--entry", metavar="COMMAND", help=f"What to run, in quotes: {_SHELL} when not given.")
    ] = None,
    connect_timeout: Annotated[
        int, typer.Option("--connect-timeout", metavar="SECONDS", min=1, help="How long the node may take to answer.")
    ] = 60,
    keep_alive: Annotated[
        bool, typer.Option("--keep-alive", help="When the connection breaks, connect again and start the command anew.")
    ] = False,
) -> None:
    """Run a command beside a running task: on its node, in its directory, with its environment and GPUs.

    In a terminal, the command has one too; otherwise pipes. The exit code is the command's (with --group the highest). The
    command ends with the connection and with the task, and so does whatever it started: nothing stays behind. Values of
    --set-env and of credentials are there as in the task.
    """
    argv = _parse(entry if entry is not None else _SHELL)
    if (task is None) == (group is None):
        raise InputError("name a task, or a group with --group", hint="not both, and not none of them")
    if group is not None and keep_alive:
        raise InputError("--keep-alive is for one task, and --group names several")
    if group is not None and entry is None:
        raise InputError("--group has no terminal for a shell", hint="say with --entry what to run on every task")
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
            return find_running_task(client, workflow, task, connect_timeout)

    raise typer.Exit(_run_on_one(found[0], argv, connect_timeout, find_again if keep_alive else None))


def _parse(entry: str) -> list[str]:
    try:
        argv = shlex.split(entry)
    except ValueError as error:
        raise InputError(f"--entry {entry!r}: {error}") from None
    if not argv:
        raise InputError("--entry names no command")
    return argv


def _run_on_one(
    task: RunningTask, argv: Sequence[str], connect_timeout: int, find_again: Callable[[], RunningTask] | None
) -> int:
    """Run it next to one task. ``find_again`` looks the task up when a connection that broke is to be made again."""
    keyboard = _Keyboard()
    while True:
        try:
            return _once(task, argv, connect_timeout, keyboard)
        except (HostKeyUnknown, HostKeyMismatch, AuthenticationRefused):
            raise
        except NodeUnreachable as error:
            if find_again is None or not keyboard.was_used:
                raise
            keyboard.hold()
            print(f"{plain_lines(str(error))}; connecting again, Ctrl-C ends it", file=sys.stderr)
        pause(_AGAIN_S)
        task = find_again()


def _once(task: RunningTask, argv: Sequence[str], connect_timeout: int, keyboard: _Keyboard) -> int:
    has_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    if not has_terminal:
        session = task.open(argv, None, connect_timeout)
        try:
            keyboard.lead_to(session)
            return _carry(session)
        finally:
            session.close()
    fd = sys.stdin.fileno()
    rows, columns = read_size(fd)
    session = task.open(argv, (Size(rows=rows, columns=columns), os.environ.get("TERM", "")), connect_timeout)
    try:
        with raw_terminal(fd, lambda rows, columns: session.resize(Size(rows=rows, columns=columns))):
            keyboard.lead_to(session)
            return _carry(session)
    finally:
        session.close()


def _carry(session: Session) -> int:
    """Carry output until the command ends; return its exit code."""
    for event in session.events():
        if isinstance(event, Exit):
            if event.why:
                print(f"\r\n{plain(event.why)}\r", file=sys.stderr)
            return event.code
        is_error, data = event
        _write(2 if is_error else 1, data)
    raise AssertionError("a session ends with an Exit")


class _Keyboard:
    """Standard input, read for whichever session is the present one; what comes while there is none waits for the next."""

    def __init__(self) -> None:
        self._session: Session | None = None
        self._is_led = threading.Event()

    @property
    def was_used(self) -> bool:
        """Whether there was a session."""
        return self._session is not None

    def lead_to(self, session: Session) -> None:
        """Give ``session`` what comes from now on."""
        is_first, self._session = self._session is None, session
        self._is_led.set()
        if is_first:
            threading.Thread(target=self._read, name="input", daemon=True).start()

    def hold(self) -> None:
        """Give nobody anything."""
        self._is_led.clear()

    def _read(self) -> None:
        while True:
            try:
                data = os.read(0, _READ)
            except OSError:
                data = b""
            self._is_led.wait()
            if self._session is None:
                continue
            if data:
                self._session.write(data)
            else:
                self._session.end_input()
                self._is_led.clear()  # the next one, if there will be one, gets no input either


def _write(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


class _Prefixed:
    """Lines of several tasks, whole, each behind its task's name."""

    def __init__(self) -> None:
        self._paint, self._lock = Paint.of(sys.stdout), threading.Lock()
        self._rests: dict[tuple[str, bool], bytes] = {}

    def add(self, number: int, task: str, is_error: bool, data: bytes, *, is_last: bool = False) -> None:
        """Show the lines that ``data`` completes; the last one also without its end."""
        *lines, rest = (self._rests.get((task, is_error), b"") + data).split(b"\n")
        self._rests[task, is_error] = b"" if is_last else rest
        prefix = f"{self._paint.task(f'[{task}]', number)} ".encode()
        with self._lock:
            _write(
                2 if is_error else 1,
                b"".join(prefix + line + b"\n" for line in [*lines, *([rest] if is_last and rest else [])]),
            )


def _run_on_all(tasks: Sequence[RunningTask], argv: Sequence[str], connect_timeout: int) -> int:
    """Run it next to every task; return the highest exit code. Raises the first error when one could not be run."""
    shown = _Prefixed()

    def show_output(number: int, is_error: bool, data: bytes) -> None:
        shown.add(number, tasks[number].task, is_error, data)

    def show_exit(number: int, end: Exit) -> None:
        for is_error, words in ((False, ""), (True, end.why)):
            shown.add(number, tasks[number].task, is_error, words.encode(), is_last=True)

    ended = run_on_tasks(tasks, argv, connect_timeout, on_output=show_output, on_exit=show_exit)
    for error in ended.errors[1:]:
        print(f"error: {plain_lines(str(error))}", file=sys.stderr)
    if ended.errors:
        raise ended.errors[0]
    return max(ended.codes)
