"""``distflow workflow exec``."""

from __future__ import annotations

import os
import shlex
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Annotated

import typer

from distflow.backends.machines.inspection.session import Exit, Session, Size
from distflow.cli.beside import Place, find_place
from distflow.cli.command import command_app
from distflow.cli.reading import WorkflowArgument, choose_tasks, open_workflow, pause
from distflow.cli.tables import Paint, plain, plain_lines
from distflow.cli.terminal import raw_terminal, read_size
from distflow.documents.words import did_you_mean
from distflow.errors import (
    AuthenticationRefused,
    DistflowError,
    HostKeyMismatch,
    HostKeyUnknown,
    InputError,
    NodeUnreachable,
    NotFound,
)
from distflow.state.record import TaskRecord, WorkflowRecord

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
    with open_workflow(workflow, tell_age=False) as (directory, store, record):
        chosen = choose_tasks(record, [task]) if task is not None else _group(record, group or "")
        places = [find_place(directory, store, record, name, one, connect_timeout) for name, one in chosen]
    if task is None:
        raise typer.Exit(_all(places, argv, connect_timeout))

    def again() -> Place:
        with open_workflow(workflow, tell_age=False) as (directory, store, record):
            ((name, one),) = choose_tasks(record, [task])
            return find_place(directory, store, record, name, one, connect_timeout)

    raise typer.Exit(_one(places[0], argv, connect_timeout, again if keep_alive else None))


def _parse(entry: str) -> list[str]:
    try:
        argv = shlex.split(entry)
    except ValueError as error:
        raise InputError(f"--entry {entry!r}: {error}") from None
    if not argv:
        raise InputError("--entry names no command")
    return argv


def _group(record: WorkflowRecord, name: str) -> list[tuple[str, TaskRecord]]:
    there = [one.name for one in record.groups]
    if name not in there:
        raise NotFound(f"{record.id} has no group {name!r}", hint=did_you_mean(name, there, what="groups"))
    return [(name, task) for task in record.group(name).tasks]


def _one(place: Place, argv: Sequence[str], connect_timeout: int, again: Callable[[], Place] | None) -> int:
    """Run it beside one task. ``again`` looks the task up once more, when a connection that broke is to be made anew."""
    keyboard = _Keyboard()
    while True:
        try:
            return _once(place, argv, connect_timeout, keyboard)
        except (HostKeyUnknown, HostKeyMismatch, AuthenticationRefused):
            raise
        except NodeUnreachable as error:
            if again is None or not keyboard.was_used:
                raise
            keyboard.hold()
            print(f"{plain_lines(str(error))}; connecting again, Ctrl-C ends it", file=sys.stderr)
        pause(_AGAIN_S)
        place = again()


def _once(place: Place, argv: Sequence[str], connect_timeout: int, keyboard: _Keyboard) -> int:
    has_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    if not has_terminal:
        session = place.open(argv, None, connect_timeout)
        try:
            keyboard.lead_to(session)
            return _carry(session)
        finally:
            session.close()
    fd = sys.stdin.fileno()
    rows, columns = read_size(fd)
    session = place.open(argv, (Size(rows=rows, columns=columns), os.environ.get("TERM", "")), connect_timeout)
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


def _all(places: Sequence[Place], argv: Sequence[str], connect_timeout: int) -> int:
    """Run it beside every task; return the highest exit code. Raises the first error when one could not be run."""
    shown = _Prefixed()
    codes: list[int] = []
    errors: list[DistflowError] = []
    sessions: list[Session] = []

    def follow(number: int, place: Place) -> None:
        session = place.open(argv, None, connect_timeout)
        sessions.append(session)
        session.end_input()
        for event in session.events():
            if isinstance(event, Exit):
                codes.append(event.code)
                for is_error, words in ((False, ""), (True, event.why)):
                    shown.add(number, place.task, is_error, words.encode(), is_last=True)
            else:
                shown.add(number, place.task, *event)

    def run(number: int, place: Place) -> None:
        try:
            follow(number, place)
        except DistflowError as error:
            errors.append(error)
        except OSError:
            codes.append(1)  # nobody reads any more

    try:
        _at_once(run, places)
    finally:
        for session in sessions:
            session.close()
    for error in errors[1:]:
        print(f"error: {plain_lines(str(error))}", file=sys.stderr)
    if errors:
        raise errors[0]
    return max(codes)


def _at_once(run: Callable[[int, Place], None], places: Sequence[Place]) -> None:
    threads = [threading.Thread(target=run, args=numbered, daemon=True) for numbered in enumerate(places)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
