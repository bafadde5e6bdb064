"""This machine as a node: commands as child processes."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import threading
from collections.abc import Mapping, Sequence
from typing import ClassVar

from distflow.errors import NodeUnreachable
from distflow.transports.base import Completed, command_closed

__all__ = ["LocalChannel", "LocalStream", "LocalTransport", "login_environment"]

_READ = 65536
_LOGIN_VARIABLES = frozenset({"HOME", "LANG", "LD_LIBRARY_PATH", "LOGNAME", "PATH", "SHELL", "TMPDIR", "TZ", "USER"})
_LOGIN_PREFIXES = ("LC_", "PYENV_", "XDG_")
_TAIL = 16384
_DRAIN_TIMEOUT_S = 2.0


class LocalTransport:
    """Runs commands on this machine (contract: ``transports.base.Transport``)."""

    umask: ClassVar[int] = -1
    """The umask of the commands; -1 for the umask of this process. The supervisor, whose own umask is stricter, sets it to the
    umask of its user."""

    def __init__(self, name: str = "local") -> None:
        """``name`` is the node's name in messages."""
        self.name = name

    @property
    def reached_address(self) -> str | None:
        """``None``: commands do not use a network."""
        return None

    @property
    def named_addresses(self) -> tuple[str, ...]:
        """Empty: there is no jump host."""
        return ()

    def run(self, argv: Sequence[str], *, input: bytes = b"", timeout_s: float) -> Completed:
        """Run a command to its end."""
        try:
            process = _start(argv, self.umask)
        except OSError as error:
            return _not_started(argv, error)
        with process:
            try:
                stdout, stderr = process.communicate(input, timeout=timeout_s)
            except subprocess.TimeoutExpired:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                # Child processes in other sessions may still hold the pipes: do not wait for them.
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.communicate(timeout=_DRAIN_TIMEOUT_S)
                raise NodeUnreachable(self.name, f"`{argv[0]}` did not finish within {timeout_s:g} s") from None
        return Completed(exit_code=_shell_exit_code(process.returncode), stdout=stdout, stderr=stderr)

    def open(self, argv: Sequence[str]) -> LocalChannel:
        """Start a command and keep a channel to it."""
        try:
            return LocalChannel(self.name, _start(argv, self.umask))
        except OSError as error:
            return LocalChannel(self.name, None, _not_started(argv, error))

    def dial(self, port: int, *, timeout_s: float) -> LocalStream:
        """Connect to a TCP port of this machine."""
        try:
            return LocalStream(self.name, socket.create_connection(("127.0.0.1", port), timeout=timeout_s))
        except OSError as error:
            raise NodeUnreachable(self.name, f"nothing answers on its port {port} ({error.strerror or error})") from error

    def hang_up(self) -> None:
        """Do nothing: there is no connection."""

    def close(self) -> None:
        """Do nothing: there is no connection."""


class LocalStream:
    """A connection to this machine (contract: ``transports.base.Stream``)."""

    def __init__(self, node: str, connection: socket.socket) -> None:
        """Use ``connection``."""
        self._node = node
        self._socket = connection
        connection.settimeout(None)

    def read(self) -> bytes:
        """Wait for data and return up to 64 KiB of it."""
        try:
            return self._socket.recv(_READ)
        except OSError:
            return b""

    def write(self, data: bytes) -> None:
        """Send ``data``."""
        try:
            self._socket.sendall(data)
        except OSError as error:
            raise NodeUnreachable(self._node, f"the other side closed the connection ({error.strerror})") from error

    def end(self) -> None:
        """Close the sending direction."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Close the connection."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


class LocalChannel:
    """A child process's pipes (contract: ``transports.base.Channel``)."""

    def __init__(self, node: str, process: subprocess.Popen[bytes] | None, failed: Completed | None = None) -> None:
        """Use the pipes of ``process``. If it is ``None``, the command did not start, and ``failed`` is its result."""
        self._node = node
        self._process = process
        self._failed = failed
        self._stderr = bytearray(failed.stderr if failed is not None else b"")
        self._writing = threading.Lock()
        self._reading = threading.Lock()
        self._state = threading.Lock()
        self._is_closed = False
        # Closing a descriptor does not wake a thread that waits for it. A byte in this pipe does.
        self._wake_read, self._wake_write = os.pipe()
        self._drain = threading.Thread(target=self._drain_stderr, name=f"stderr of {node}", daemon=True)
        if process is not None and process.stdin is not None and process.stdout is not None:
            os.set_blocking(process.stdin.fileno(), False)
            self._drain.start()

    def write(self, data: bytes) -> None:
        """Send ``data`` to the command's standard input."""
        view = memoryview(data)
        with self._writing:
            while view:
                if self._process is None or self._process.stdin is None or self._is_closed:
                    raise command_closed(self._node)
                fd = self._process.stdin.fileno()
                if not self._wait(fd, select.POLLOUT):
                    raise NodeUnreachable(self._node, "the connection to the command was closed during a write")
                try:
                    view = view[os.write(fd, view[:_READ]) :]
                except BlockingIOError:
                    continue
                except OSError as error:
                    what = f"the command has ended or closed its input ({error.strerror})"
                    raise NodeUnreachable(self._node, what) from error

    def read(self) -> bytes:
        """Wait for output and return up to 64 KiB of it."""
        with self._reading:
            if self._process is None or self._process.stdout is None or self._is_closed:
                return b""
            fd = self._process.stdout.fileno()
            data = b""
            if self._wait(fd, select.POLLIN):
                with contextlib.suppress(OSError):
                    data = os.read(fd, _READ)
                if not data:
                    self._drain.join(_DRAIN_TIMEOUT_S)
            return data

    def stderr_tail(self) -> str:
        """The end of the command's standard error."""
        with self._state:
            return bytes(self._stderr[-_TAIL:]).decode("utf-8", "replace")

    @property
    def exit_code(self) -> int | None:
        """The command's exit code; ``None`` while it runs, or while another process holds its standard error."""
        if self._process is None:
            return self._failed.exit_code if self._failed is not None else None
        return _shell_exit_code(self._process.returncode) if self._process.returncode is not None else None

    def close(self) -> None:
        """Close standard input and output. The command continues, and its standard error is still read."""
        with self._state:
            if self._is_closed:
                return
            self._is_closed = True
        os.write(self._wake_write, b"x")
        with self._writing, self._reading:  # threads in `read` or `write` have seen the byte and returned
            if self._process is not None:
                for pipe in (self._process.stdin, self._process.stdout):
                    if pipe is not None:
                        with contextlib.suppress(OSError):
                            pipe.close()
            os.close(self._wake_read)
            os.close(self._wake_write)

    def _wait(self, fd: int, events: int) -> bool:
        """Wait until the pipe is ready. Returns False if the channel was closed first."""
        # Not select(), which cannot handle descriptors from 1024 on.
        poll = select.poll()
        poll.register(fd, events)
        poll.register(self._wake_read, select.POLLIN)
        return all(ready != self._wake_read for ready, _ in poll.poll())

    def _drain_stderr(self) -> None:
        """Keep the end of standard error. Then wait for the process, which would otherwise remain as a zombie."""
        if self._process is None or self._process.stderr is None:
            return
        with self._process.stderr as pipe:
            while data := os.read(pipe.fileno(), _READ):
                with self._state:
                    self._stderr += data
                    del self._stderr[:-_TAIL]
        self._process.wait()


def _start(argv: Sequence[str], umask: int) -> subprocess.Popen[bytes]:
    # A separate session, so that Ctrl-C in the terminal does not reach the command.
    pipe = subprocess.PIPE
    return subprocess.Popen(
        list(argv), stdin=pipe, stdout=pipe, stderr=pipe, bufsize=0, start_new_session=True, umask=umask,
        env=login_environment(os.environ),
    )  # fmt: skip


def _shell_exit_code(code: int) -> int:
    return code if code >= 0 else 128 - code


def login_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return only the variables that a login usually sets, such as HOME, PATH and LANG.

    Other variables of the shell that started the supervisor (a WORLD_SIZE, a token) must not reach the tasks.
    """
    return {name: value for name, value in environ.items() if name in _LOGIN_VARIABLES or name.startswith(_LOGIN_PREFIXES)}


def _not_started(argv: Sequence[str], error: OSError) -> Completed:
    """Return the result that a login shell would report."""
    code = 127 if isinstance(error, FileNotFoundError) else 126
    return Completed(exit_code=code, stdout=b"", stderr=f"{argv[0]}: {error.strerror}\n".encode())
