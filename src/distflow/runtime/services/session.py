"""One more command in the surroundings of a running task: its directory and environment, with a terminal of its own or pipes.

Frames in both directions (``>IB``: length and kind, then that many bytes). To us: ``REQUEST`` (JSON: ``attempt``, ``argv``,
``secret_env``, ``terminal``: null or ``{rows, columns, term}``, ``plain``: on the node itself, without its prelude), then
``INPUT``, ``RESIZE`` (JSON), ``END_OF_INPUT``, ``PING``.
From us: ``STARTED``, or ``REFUSED`` (JSON: ``kind``, ``message``) and nothing more; then ``OUTPUT``, ``ERRORS``, at last
``EXIT`` (JSON: ``code``, ``why``).

What it starts ends with it: when the command ends, when the connection does, and when the task's attempt does. Nothing can be
detached, for the attempt's GPUs are another's as soon as it has ended. See docs/agent-protocol.md.
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
from typing import Callable, Dict, Iterator, List, Optional, Tuple

from distflow.runtime import processes
from distflow.runtime.files import attempt_files, attempts, records
from distflow.runtime.files.frames import FRAME, LARGEST_FRAME
from distflow.runtime.guard import command
from distflow.runtime.guard.kill_tree import TreeKiller
from distflow.runtime.services.peer import SILENCE_S
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
_LOOK_S = 1.0
"""How often it is asked whether the attempt has ended."""
_TRICKLE_S = 5.0
"""Input that the command does not take is left unread, but for one read every so often: pings wait behind it."""
_MOST_INPUT = 64 << 20
"""Bytes of input that wait for the command; beyond them nothing is read, and silence means nothing."""
_GRACE_S = 1.0
"""Between the hang-up and the kill."""


def serve(root: str, umask: int) -> None:
    """Run the one command that is asked for."""
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
        wire.say(REFUSED, json.dumps(error.as_json()).encode())
        return
    except Exception as error:  # the submitter must be told, whatever it was
        wire.say(REFUSED, json.dumps(OpError("internal", repr(error)).as_json()).encode())
        return
    try:
        session.run()
    except _TaskEnded:
        session.why = "the task has ended, and the command with it"
    except OSError:
        pass  # the connection ended
    session.end()


class _TaskEnded(Exception):
    """The attempt is over."""


def _launch(directory: str, request: Json) -> Json:
    """What the task was started with, but for its command."""
    status = attempts.read_status(directory)
    if status["phase"] != "running":
        raise OpError("not_running", "it does not run on this node ({})".format(status["phase"]))
    with open(os.path.join(directory, attempt_files.LAUNCH), "rb") as file:
        launch = command.fill(decode_object(file.read(MAX_LINE + 1), max_bytes=MAX_LINE), directory)
    launch["argv"] = list(request["argv"])
    launch["secret_env"] = dict(request.get("secret_env") or {})
    if request.get("plain"):
        launch.update(shell_prelude=None, container=None)
    return dict(launch)


class _Wire:
    """The frames on standard input and output. Raises ``OSError`` when the other side is gone, or silent for too long."""

    def __init__(self) -> None:
        self._received = bytearray()
        self._unsent = bytearray()
        self._heard = time.monotonic()
        os.set_blocking(1, False)

    def request(self) -> Json:
        """The first frame."""
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
        """Read what is there, or wait for something."""
        data = os.read(0, _READ)
        if not data:
            raise OSError(errno.EPIPE, "the connection ended")
        self._heard = time.monotonic()
        self._received += data

    def frames(self) -> Iterator[Tuple[int, bytes]]:
        """Take the frames that are complete."""
        while len(self._received) >= FRAME.size:
            size, kind = FRAME.unpack_from(self._received)
            if size > LARGEST_FRAME:
                raise OSError(errno.EPROTO, "this is no frame")
            if len(self._received) < FRAME.size + size:
                return
            content = bytes(self._received[FRAME.size : FRAME.size + size])
            del self._received[: FRAME.size + size]
            yield kind, content

    def is_read(self, waiting: int) -> bool:
        """Whether the other side is read from while so many bytes of its wait."""
        if waiting < LARGEST_FRAME:
            return True
        return waiting < _MOST_INPUT and time.monotonic() - self._heard > _TRICKLE_S

    def look(self, waiting: int = 0) -> None:
        """Raise ``OSError`` when nothing was heard for too long."""
        if waiting < _MOST_INPUT and time.monotonic() - self._heard > SILENCE_S:
            raise OSError(errno.ETIMEDOUT, "nothing was heard")

    def say(self, kind: int, data: bytes, look: Optional[Callable[[], None]] = None) -> None:
        """Write a frame. Who reads may take long: meanwhile the other side is listened to, and ``look`` is called.

        What that raises cuts no frame in two: the rest goes before the next one.
        """
        self._unsent += FRAME.pack(len(data), kind) + data
        while self._unsent:
            try:
                del self._unsent[: os.write(1, self._unsent[:_READ])]
            except BlockingIOError:
                poll = select.poll()
                poll.register(1, select.POLLOUT)
                if self.is_read(len(self._received)):
                    poll.register(0, select.POLLIN)
                if any(fd == 0 for fd, _ in poll.poll(_LOOK_S * 1000)):
                    self.receive()
                self.look(len(self._received))
                if look is not None:
                    look()


class _Session:
    """The command, and what passes between it and the other side."""

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
        self._looked = time.monotonic()
        self.why = ""

    def start(self, launch: Json, attempt: str, terminal: Optional[Json], umask: int) -> None:
        """Start the command."""
        env = command.environment(launch, attempt, self._directory)
        # What fails here is no failure of the task, and what beats here no sign of its life.
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
        wake, self._wake = os.pipe()
        for fd in (wake, self._wake):
            os.set_blocking(fd, False)
        self._woken = wake
        signal.set_wakeup_fd(self._wake, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        if terminal is not None:
            self._has_terminal = True
            master, slave = pty.openpty()
            _resize(master, terminal)
            inner, mine, outer = (slave, slave, slave), [slave], {master: OUTPUT}
            self._input = master
        else:
            pipes = [os.pipe() for _ in range(3)]
            inner = (pipes[0][0], pipes[1][1], pipes[2][1])
            mine, outer = list(inner), {pipes[1][0]: OUTPUT, pipes[2][0]: ERRORS}
            self._input = pipes[0][1]
        parent = os.getpid()
        self._pid = os.fork()
        if self._pid == 0:
            _become(argv, env, cwd, inner, umask, parent, terminal is not None)
        for fd in mine:
            os.close(fd)
        for fd in (self._input, *outer):
            os.set_blocking(fd, False)
        self._outputs = outer

    def run(self) -> None:
        """Carry bytes until the command ends. Raises ``OSError`` when the connection ends before, or ``_TaskEnded``."""
        self._wire.say(STARTED, b"")
        self._receive()
        while self._code is None:
            for fd, ready in self._poll(self._wire.is_read(len(self._waiting))):
                if fd == 0:
                    self._wire.receive()
                elif fd == self._woken:
                    self._drop_wakes()
                    self._reap()
                if fd == self._input and ready & (select.POLLOUT | select.POLLERR):
                    self._feed()
                if fd in self._outputs and ready & (select.POLLIN | select.POLLHUP | select.POLLERR):
                    self._carry(fd, self._look)
            self._receive()  # also what was heard while output waited to be read
            self._wire.look(len(self._waiting))
            self._look()

    def _poll(self, is_read: bool) -> List[Tuple[int, int]]:
        poll = select.poll()
        events = dict.fromkeys((self._woken, *self._outputs), select.POLLIN)
        if is_read:
            events[0] = select.POLLIN
        if self._waiting and self._input >= 0:
            events[self._input] = events.get(self._input, 0) | select.POLLOUT
        for fd, wanted in events.items():
            poll.register(fd, wanted)
        return poll.poll(_LOOK_S * 1000)

    def _look(self) -> None:
        """Say when the attempt has ended."""
        now = time.monotonic()
        if now - self._looked >= _LOOK_S:
            self._looked = now
            if records.read_end(self._directory) is not None:
                raise _TaskEnded

    def end(self) -> None:
        """End all that is left, and tell how the command ended."""
        try:
            os.killpg(self._pid, signal.SIGHUP)
        except OSError:
            pass  # it is not there any more
        if self._input >= 0 and not self._has_terminal:
            os.close(self._input)  # after the signal: a command that reads must not take this for the end of what it was given
        me = os.getpid()
        patience = time.monotonic() + _GRACE_S
        while self._reap() and self._code is None and time.monotonic() < patience:
            select.select([self._woken], [], [], 0.05)
            self._drop_wakes()
        hunt = TreeKiller(
            lambda everything: processes.only_descendants(everything, me), lambda one: processes.is_below(one, me)
        )
        while hunt.step() and not hunt.is_over:
            self._reap()
            select.select([], [], [], hunt.pause_s)
        self._reap()
        try:
            for fd in list(self._outputs):
                while fd in self._outputs and self._carry(fd):
                    continue
            told = {"code": 137 if self._code is None else self._code, "why": self.why}
            self._wire.say(EXIT, json.dumps(told).encode())
        except OSError:
            pass  # nobody listens

    def _drop_wakes(self) -> None:
        try:
            os.read(self._woken, 4096)
        except BlockingIOError:
            pass

    def _reap(self) -> bool:
        """Take the children that ended. True if there are others."""
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
                _resize(self._input, decode_object(content))
            elif kind == END_OF_INPUT:
                self._input_ends = True
        self._feed()

    def _feed(self) -> None:
        """Give the command what waits for it."""
        try:
            while self._waiting and self._input >= 0:
                del self._waiting[: os.write(self._input, self._waiting[:_READ])]
        except BlockingIOError:
            return
        except OSError:  # it takes no more
            self._waiting.clear()
            self._input_ends = True
        if self._input_ends and not self._has_terminal and self._input >= 0:
            os.close(self._input)
            self._input = -1

    def _carry(self, fd: int, look: Optional[Callable[[], None]] = None) -> bool:
        """Tell what the command wrote. True if there may be more."""
        try:
            data = os.read(fd, _READ)
        except BlockingIOError:
            return False
        except OSError:  # EIO: nobody has the terminal open any more
            data = b""
        if not data:
            del self._outputs[fd]
            if fd != self._input:
                os.close(fd)
            return False
        self._wire.say(self._outputs[fd], data, look)
        return True


def _become(
    argv: List[str], env: Dict[str, str], cwd: str, inner: Tuple[int, int, int], umask: int, parent: int, has_terminal: bool
) -> None:
    code, message = 126, "it could not be started"
    try:
        signal.set_wakeup_fd(-1)
        os.setsid()
        if not processes.die_with_parent(signal.SIGKILL, parent):
            os._exit(126)
        if has_terminal:
            fcntl.ioctl(inner[0], termios.TIOCSCTTY, 0)
        for number, fd in enumerate(inner):
            os.dup2(fd, number)
        processes.close_all_but(set())
        os.umask(umask)
        processes.reset_signals()
        os.chdir(cwd)
        os.execvpe(argv[0], argv, env)
    except (FileNotFoundError, NotADirectoryError):
        code, message = 127, "not found on this node in PATH={}".format(env.get("PATH", ""))
    except OSError as error:
        message = str(error.strerror)
    except BaseException as error:  # nothing may unwind into the parent's code in this process
        message = repr(error)
    finally:
        os.write(2, "{}: {}\n".format(argv[0] if argv else "", message).encode("utf-8", "replace"))
        os._exit(code)


def _resize(fd: int, size: Json) -> None:
    rows, columns = (max(1, min(65535, int(size.get(name) or 0))) for name in ("rows", "columns"))
    fcntl.ioctl(fd, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
