"""A command next to a running task: in the task's directory and environment, with its own terminal or pipes.

Both sides send frames (``>IB``: length and kind, then the content). The submitter sends ``REQUEST`` (JSON: ``attempt``,
``argv``, ``secret_env``, ``terminal``: null or ``{rows, columns, term}``, ``plain``: whether to run outside of the task's
container and without its prelude), then ``INPUT``, ``RESIZE`` (JSON), ``END_OF_INPUT``, ``PING``. The session sends
``STARTED``, then ``OUTPUT`` and ``ERRORS``, and finally ``EXIT`` (JSON: ``code``, ``why``). A program that cannot be executed
ends with the code 126 or 127, as in a shell. If the session refuses the request, it sends only ``REFUSED`` (JSON: ``kind``,
``message``).

The session kills all its descendants when the command, the connection or the task's attempt ends. They cannot be detached,
because the attempt's GPUs may be leased again as soon as the attempt has ended. See docs/agent-protocol.md.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import pty
import select
import signal
import struct
import termios
import time

from distflow.protocol.light_typing import Callable, Dict, Iterator, List, Optional, Tuple
from distflow.runtime import processes
from distflow.runtime.files import attempt_files, attempts, records
from distflow.runtime.guard import command
from distflow.runtime.guard.process_tree import TreeKiller
from distflow.runtime.services.frames import FRAME, LARGEST_FRAME, SILENCE_S
from distflow.runtime.untrusted import decode_object
from distflow.runtime.wire import MAX_LINE, Json, OpError

__all__ = [
    "END_OF_INPUT",
    "ERRORS",
    "EXIT",
    "INPUT",
    "OUTPUT",
    "PING",
    "REFUSED",
    "REQUEST",
    "RESIZE",
    "STARTED",
    "serve",
]

REQUEST, INPUT, RESIZE, END_OF_INPUT, PING = 1, 2, 3, 4, 5
STARTED, REFUSED, OUTPUT, ERRORS, EXIT = 11, 12, 13, 14, 15

_READ = 65536
_CHECK_S = 1.0
"""Interval of the checks whether the attempt has ended."""
_TRICKLE_S = 5.0
"""While the command does not read its input, the submitter is read once in this interval, because pings arrive behind input."""
_MAX_INPUT = 64 << 20
"""Maximum bytes of waiting input. With more, the submitter is not read, and its silence is ignored."""
_GRACE_S = 1.0
"""Time between the hang-up signal and the kill."""


def serve(root: str, umask: int) -> None:
    """Read one request from standard input, run its command, and forward data until the command or the task ends.

    ``root`` is distflow's directory on the node, and ``umask`` that of the command.
    """
    processes.rename_self("df-session")
    processes.hide_memory()
    processes.adopt_orphans()
    wire = _Wire()
    try:
        request = wire.request()
        directory = attempts.directory_of(root, request.get("attempt"))
        session = _Session(wire, directory)
        session.start(_launch(directory, request), request["attempt"], request.get("terminal"), umask)
    except EOFError:
        return
    except OpError as error:
        wire.send(REFUSED, json.dumps(error.as_json()).encode())
        return
    except Exception as error:  # the submitter must get a reply for every error
        wire.send(REFUSED, json.dumps(OpError("internal", repr(error)).as_json()).encode())
        return
    try:
        session.run()
    except _TaskEnded:
        session.why = "the task has ended, so the command was killed"
    except OSError:
        pass  # the connection ended
    session.end()


class _TaskEnded(Exception):
    """The attempt has ended."""


def _launch(directory: str, request: Json) -> Json:
    """Return the task's ``launch.json`` with the requested command in place of the task's. Raises ``OpError``."""
    status = attempts.read_status(directory)
    if status["phase"] != "running":
        raise OpError("not_running", "the task is not running on this node ({})".format(status["phase"]))
    with open(os.path.join(directory, attempt_files.LAUNCH), "rb") as file:
        launch = command.fill_placeholders(decode_object(file.read(MAX_LINE + 1), max_bytes=MAX_LINE), directory)
    launch["argv"] = list(request["argv"])
    launch["secret_env"] = dict(request.get("secret_env") or {})
    if request.get("plain"):
        launch.update(shell_prelude=None, container=None)
    return dict(launch)


class _Wire:
    """Frames on standard input and output. Raises ``OSError`` if the submitter is gone, or silent for too long."""

    def __init__(self) -> None:
        self._received = bytearray()
        self._unsent = bytearray()
        self._received_at = time.monotonic()
        os.set_blocking(1, False)

    def request(self) -> Json:
        """Return the request, which is the first frame. Raises ``EOFError`` if the submitter is gone or silent."""
        while True:
            for kind, content in self.frames():
                if kind != REQUEST:
                    raise OpError("bad_request", "the first frame is not a request")
                found: Json = decode_object(content)
                return found
            try:
                poll = select.poll()
                poll.register(0, select.POLLIN)
                if not poll.poll(SILENCE_S * 1000):
                    raise EOFError
                self.receive()
            except OSError:
                raise EOFError from None

    def receive(self) -> None:
        """Read available data, or wait for some."""
        data = os.read(0, _READ)
        if not data:
            raise OSError(errno.EPIPE, "the connection ended")
        self._received_at = time.monotonic()
        self._received += data

    def frames(self) -> Iterator[Tuple[int, bytes]]:
        """Yield the complete frames."""
        while len(self._received) >= FRAME.size:
            size, kind = FRAME.unpack_from(self._received)
            if size > LARGEST_FRAME:
                raise OSError(errno.EPROTO, "received a frame of {} bytes; the limit is {} bytes".format(size, LARGEST_FRAME))
            if len(self._received) < FRAME.size + size:
                return
            content = bytes(self._received[FRAME.size : FRAME.size + size])
            del self._received[: FRAME.size + size]
            yield kind, content

    def should_read(self, waiting: int) -> bool:
        """Return whether to read from the submitter while ``waiting`` bytes of input wait for the command."""
        if waiting < LARGEST_FRAME:
            return True
        return waiting < _MAX_INPUT and time.monotonic() - self._received_at > _TRICKLE_S

    def check(self, waiting: int = 0) -> None:
        """Raise ``OSError`` if the submitter was silent for too long.

        With ``_MAX_INPUT`` or more ``waiting`` bytes, the submitter is not read, so its silence is ignored.
        """
        if waiting < _MAX_INPUT and time.monotonic() - self._received_at > SILENCE_S:
            raise OSError(errno.ETIMEDOUT, "the submitter sent nothing for {:g} s".format(SILENCE_S))

    def send(self, kind: int, data: bytes, check: Optional[Callable[[], None]] = None) -> None:
        """Write a frame.

        While the submitter reads slowly, its data is received up to a limit, and ``check`` is called. After an exception of
        ``check``, the rest of the frame is sent before the next frame.
        """
        self._unsent += FRAME.pack(len(data), kind) + data
        while self._unsent:
            try:
                del self._unsent[: os.write(1, self._unsent[:_READ])]
            except BlockingIOError:
                poll = select.poll()
                poll.register(1, select.POLLOUT)
                if self.should_read(len(self._received)):
                    poll.register(0, select.POLLIN)
                if any(fd == 0 for fd, _ in poll.poll(_CHECK_S * 1000)):
                    self.receive()
                self.check(len(self._received))
                if check is not None:
                    check()


class _Session:
    """The command, and the data between it and the submitter."""

    def __init__(self, wire: _Wire, directory: str) -> None:
        self._wire = wire
        self._directory = directory
        self._pid = 0
        self._code: Optional[int] = None
        self._input = -1
        self._outputs: Dict[int, int] = {}
        self._has_terminal = False
        self._waiting = bytearray()
        self._input_ends = False
        self._checked_at = time.monotonic()
        self.why = ""

    def start(self, launch: Json, attempt: str, terminal: Optional[Json], umask: int) -> None:
        """Start the command."""
        env = command.environment(launch, attempt, self._directory)
        # This command must write neither the task's heartbeat nor its error file.
        del env["DISTFLOW_HEARTBEAT"]
        if env.get("TORCHELASTIC_ERROR_FILE", "").startswith(self._directory + os.sep):
            del env["TORCHELASTIC_ERROR_FILE"]
        if terminal is not None:
            env["TERM"] = str(terminal.get("term") or "dumb")
        argv = list(launch["argv"])
        if launch.get("container"):
            from distflow.runtime.guard import containers

            argv = containers.enter(launch, attempt, self._directory, env, terminal is not None)
        argv = command.with_prelude(argv, launch.get("shell_prelude"), env)
        cwd = os.path.join(self._directory, launch.get("cwd") or "work")
        self._wakeup_reader, self._wakeup_writer = os.pipe()
        for fd in (self._wakeup_reader, self._wakeup_writer):
            os.set_blocking(fd, False)
        signal.set_wakeup_fd(self._wakeup_writer, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        if terminal is not None:
            self._has_terminal = True
            master, slave = pty.openpty()
            _resize(master, terminal)
            inner, closed, outer = (slave, slave, slave), [slave], {master: OUTPUT}
            self._input = master
        else:
            pipes = [os.pipe() for _ in range(3)]
            inner = (pipes[0][0], pipes[1][1], pipes[2][1])
            closed, outer = list(inner), {pipes[1][0]: OUTPUT, pipes[2][0]: ERRORS}
            self._input = pipes[0][1]
        parent = os.getpid()
        self._pid = os.fork()
        if self._pid == 0:
            _become_command(argv, env, cwd, inner, umask, parent, terminal is not None)
        for fd in closed:
            os.close(fd)
        for fd in (self._input, *outer):
            os.set_blocking(fd, False)
        self._outputs = outer

    def run(self) -> None:
        """Forward data until the command ends. Raises ``OSError`` or ``_TaskEnded`` if connection or task end first."""
        self._wire.send(STARTED, b"")
        self._receive()
        while self._code is None:
            for fd, ready in self._poll(self._wire.should_read(len(self._waiting))):
                if fd == 0:
                    self._wire.receive()
                elif fd == self._wakeup_reader:
                    self._drain_wakeups()
                    self._reap()
                if fd == self._input and ready & (select.POLLOUT | select.POLLERR):
                    self._write_input()
                if fd in self._outputs and ready & (select.POLLIN | select.POLLHUP | select.POLLERR):
                    self._forward_output(fd, self._check_task)
            self._receive()  # also frames that arrived while `send` waited for the submitter to read output
            self._wire.check(len(self._waiting))
            self._check_task()

    def _poll(self, should_read: bool) -> List[Tuple[int, int]]:
        poll = select.poll()
        events = dict.fromkeys((self._wakeup_reader, *self._outputs), select.POLLIN)
        if should_read:
            events[0] = select.POLLIN
        if self._waiting and self._input >= 0:
            events[self._input] = events.get(self._input, 0) | select.POLLOUT
        for fd, wanted in events.items():
            poll.register(fd, wanted)
        return poll.poll(_CHECK_S * 1000)

    def _check_task(self) -> None:
        """Raise ``_TaskEnded`` if the attempt has ended."""
        now = time.monotonic()
        if now - self._checked_at >= _CHECK_S:
            self._checked_at = now
            if records.read_end(self._directory) is not None:
                raise _TaskEnded

    def end(self) -> None:
        """Hang up the command, kill all remaining descendants, and report how the command ended."""
        try:
            os.killpg(self._pid, signal.SIGHUP)
        except OSError:
            pass  # it no longer exists
        if self._input >= 0 and not self._has_terminal:
            os.close(self._input)  # after the signal: a command that reads must not continue at the end of its input
        me = os.getpid()
        kill_at = time.monotonic() + _GRACE_S
        while self._reap() and self._code is None and time.monotonic() < kill_at:
            select.select([self._wakeup_reader], [], [], 0.05)
            self._drain_wakeups()
        killer = TreeKiller(
            lambda everything: processes.only_descendants(everything, me), lambda one: processes.is_below(one, me)
        )
        while killer.step() and not killer.is_over:
            self._reap()
            select.select([], [], [], killer.pause_s)
        self._reap()
        try:
            for fd in list(self._outputs):
                while fd in self._outputs and self._forward_output(fd):
                    continue
            exit_report = {"code": 137 if self._code is None else self._code, "why": self.why}
            self._wire.send(EXIT, json.dumps(exit_report).encode())
        except OSError:
            pass  # the submitter is gone

    def _drain_wakeups(self) -> None:
        try:
            os.read(self._wakeup_reader, 4096)
        except BlockingIOError:
            pass

    def _reap(self) -> bool:
        """Reap ended children. Returns whether children remain."""
        ended, are_left = processes.reap()
        for pid, status in ended:
            if pid == self._pid:
                self._code = os.WEXITSTATUS(status) if os.WIFEXITED(status) else 128 + os.WTERMSIG(status)
        return are_left

    def _receive(self) -> None:
        for kind, content in self._wire.frames():
            if kind == INPUT and self._input >= 0:
                self._waiting += content
            elif kind == RESIZE and self._has_terminal:
                try:
                    _resize(self._input, decode_object(content))
                except (OverflowError, TypeError, ValueError):
                    raise OSError(errno.EPROTO, "the terminal size is invalid") from None
            elif kind == END_OF_INPUT:
                self._input_ends = True
        self._write_input()

    def _write_input(self) -> None:
        """Write waiting input to the command."""
        try:
            while self._waiting and self._input >= 0:
                del self._waiting[: os.write(self._input, self._waiting[:_READ])]
        except BlockingIOError:
            return
        except OSError:  # the command accepts no more input
            self._waiting.clear()
            self._input_ends = True
        if self._input_ends and not self._has_terminal and self._input >= 0:
            os.close(self._input)
            self._input = -1

    def _forward_output(self, fd: int, check: Optional[Callable[[], None]] = None) -> bool:
        """Forward output of the command. Returns True if there may be more."""
        try:
            data = os.read(fd, _READ)
        except BlockingIOError:
            return False
        except OSError:  # EIO: no process has the terminal open
            data = b""
        if not data:
            del self._outputs[fd]
            if fd != self._input:
                os.close(fd)
            return False
        self._wire.send(self._outputs[fd], data, check)
        return True


def _become_command(
    argv: List[str], env: Dict[str, str], cwd: str, streams: Tuple[int, int, int], umask: int, parent: int, has_terminal: bool
) -> None:
    code, message = 126, "the command could not be started"
    try:
        command.prepare_exec(streams, set(), umask, parent)
        if has_terminal:
            fcntl.ioctl(0, termios.TIOCSCTTY, 0)
        code, message = command.exec_program(argv, env, cwd)
    except BaseException as error:  # this copy of the parent process must not continue with the parent's code
        message = "{}: {!r}".format(message, error)
    finally:
        os.write(2, (message + "\n").encode("utf-8", "replace"))
        os._exit(code)


def _resize(fd: int, size: Json) -> None:
    rows, columns = (max(1, min(65535, int(size.get(name) or 0))) for name in ("rows", "columns"))
    fcntl.ioctl(fd, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
