"""Start, lock and wake the supervisor: at most one process for each state directory.

A process that adds work calls ``ensure_supervisor`` afterwards. A supervisor without work first releases the lock and then
checks again, so that either it or the next supervisor sees work that was added in between.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from msgspec import Struct

from distflow import __version__
from distflow.documents.text import one_line
from distflow.errors import SupervisorError
from distflow.state.directory import StateDirectory, is_locked, try_lock
from distflow.state.store import STORE_FORMAT

__all__ = [
    "START",
    "PreloadedSupervisor",
    "SupervisorLock",
    "detach",
    "ensure_supervisor",
    "is_running",
    "open_wake_socket",
    "preload_supervisor",
    "start_errors",
    "stop_outdated_supervisor",
    "wake",
]

START = "start\n"
"""The line that lets a preloaded supervisor start working."""
_READY_TIMEOUT_S = 30.0
_END_TIMEOUT_S = 15.0
_END_POLL_S = 0.05
_MAX_ADDRESS = 103
"""The longest address of a socket in bytes (macOS; Linux: 107)."""
_LOG_LIMIT = 4 << 20


class SupervisorLock:
    """The supervisor's lock: an ``flock`` that vanishes with its process.

    The lock is on the subdirectory ``blobs`` of the state directory. A lock file alone could be removed while it is locked. The
    next supervisor would then create another one, and two supervisors would use one store. The lock file is also locked,
    because earlier versions of distflow check only that lock.
    """

    def __init__(self, directory: StateDirectory) -> None:
        """Store the directory; nothing is locked yet."""
        self._directory = directory
        self._handles: list[int] = []

    def take(self) -> bool:
        """Take the lock and return True, or return False if another process has it."""
        for path, flags in (
            (self._directory.blobs, os.O_RDONLY | os.O_DIRECTORY),
            (self._directory.lock, os.O_RDWR | os.O_CREAT),
        ):
            self._handles.append(os.open(path, flags | os.O_CLOEXEC, 0o600))
            if not try_lock(self._handles[-1]):
                self.release()
                return False
        os.ftruncate(self._handles[-1], 0)
        os.pwrite(self._handles[-1], f"{os.getpid()}\n{__version__} {STORE_FORMAT}\n".encode(), 0)
        return True

    def release(self) -> None:
        """Release the lock; without the lock, do nothing."""
        while self._handles:
            os.close(self._handles.pop())


def is_running(directory: StateDirectory) -> bool:
    """Return whether a supervisor holds the lock."""
    return is_locked(directory.blobs) or is_locked(directory.lock)


def stop_outdated_supervisor(directory: StateDirectory) -> str | None:
    """End a running supervisor of an older version of distflow, which would ignore features of newer workflows.

    Tasks continue, and the next supervisor reads their status from the nodes.

    Returns:
        The version of the ended supervisor, or ``None`` if no older supervisor was running.

    Raises:
        SupervisorError: if the supervisor does not end.

    """
    deadline, old, killed = time.monotonic() + _END_TIMEOUT_S, None, 0
    while True:
        pid, version = _read_lock(directory)
        # Without a process id, the lock file is gone or empty, and nothing is known about the supervisor.
        if not pid or not _is_outdated(version) or not is_running(directory):
            return old
        # A supervisor that has just taken the lock may not have written its own process id yet.
        if pid != killed and _is_supervisor(pid):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGTERM)
            old, killed = version.partition(" ")[0] or "0.2.0 or older", pid
        if time.monotonic() > deadline:
            pattern = shlex.quote(f"distflow.supervisor {directory.path}")
            kill = f"kill -KILL {pid}" if pid and _is_supervisor(pid) else f"pkill -KILL -f {pattern}"
            raise SupervisorError(
                "the workflow was not stored, because the supervisor of an older distflow still runs after SIGTERM, and would"
                " ignore features of this version",
                hint=f"end it, and try again (tasks continue without it): {kill}",
            )
        threading.Event().wait(_END_POLL_S)


def _read_lock(directory: StateDirectory) -> tuple[int, str]:
    """Return the process id (0 if it is unknown) and the version of the supervisor that took the lock last.

    The version consists of the version of distflow and that of the store's format. It is empty for distflow 0.2.0 or older.
    """
    try:
        pid, _, version = directory.lock.read_text(errors="replace").partition("\n")
    except OSError:
        return 0, ""
    return int(pid) if pid.isdecimal() else 0, version.strip()


def _is_outdated(version: str) -> bool:
    release, _, form = version.partition(" ")
    return (int(form) if form.isdecimal() else 0, _numbers(release)) < (STORE_FORMAT, _numbers(__version__))


def _numbers(release: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"[0-9]+", release))


def _is_supervisor(pid: int) -> bool:
    """Return whether the process with this id runs a supervisor. By now, the id may belong to another process."""
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        if os.path.exists("/proc/self/cmdline"):
            return False
        try:
            command = subprocess.run(["ps", "-o", "command=", "-p", str(pid)], capture_output=True, check=False).stdout
        except OSError:
            return False
    return b"distflow.supervisor" in command


class PreloadedSupervisor(Struct, frozen=True):
    """A supervisor that loads its modules and waits until it may start working. It exits if this process ends first."""

    process: subprocess.Popen[bytes]
    ready: int

    def load_backends(self, names: Iterable[str]) -> None:
        """Let it load the modules of the backends that it may need."""
        self._write(",".join(sorted(set(names))) + "\n")

    def start(self) -> None:
        """Let it start working."""
        self._write(START)
        if self.process.stdin is not None:
            self.process.stdin.close()

    def _write(self, line: str) -> None:
        if self.process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self.process.stdin.write(line.encode())

    def stop(self) -> None:
        """Kill the process before it begins to work."""
        os.close(self.ready)
        self.process.kill()
        self.process.communicate()


@contextlib.contextmanager
def start_errors(directory: StateDirectory) -> Iterator[None]:
    """Raise an ``OSError`` of the body, which starts a supervisor, as a ``SupervisorError``."""
    try:
        yield
    except OSError as error:
        hint = f"check free disk space, the limit of processes (`ulimit -u`) and the permissions of {directory.path}"
        raise SupervisorError(f"the supervisor cannot be started: {one_line(error)}", hint=hint) from error


def preload_supervisor(directory: StateDirectory) -> PreloadedSupervisor | None:
    """Start a supervisor that loads its modules while the caller prepares the work. Return ``None`` if one is running.

    Pass the result to ``ensure_supervisor``. Raises ``SupervisorError`` if no process can be started.
    """
    with start_errors(directory):
        return None if is_running(directory) else _launch(directory, preload=True)


def ensure_supervisor(directory: StateDirectory, *, wait: bool = True, preloaded: PreloadedSupervisor | None = None) -> None:
    """Wake the supervisor, or start one. With ``wait``, return when it is running.

    Raises ``SupervisorError`` if no process can be started, and with ``wait`` also if the supervisor does not get ready. The
    reason is then in its log.
    """
    if preloaded is None:
        with start_errors(directory):
            if is_running(directory):
                wake(directory)
                return
            preloaded = _launch(directory)
    process, ready = preloaded.process, preloaded.ready
    preloaded.start()
    try:
        if wait:
            _await_ready(process, ready, directory)
        else:
            detach(process)
    finally:
        os.close(ready)


def _launch(directory: StateDirectory, *, preload: bool = False) -> PreloadedSupervisor:
    _trim(directory.supervisor_log)
    ready, report = os.pipe()
    try:
        with open(directory.supervisor_log, "ab", opener=_private) as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "distflow.supervisor", str(directory.path), str(report)]
                + (["preload"] if preload else []),
                stdin=subprocess.PIPE if preload else subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=(report,),
                start_new_session=True,
                cwd="/",
                bufsize=0,
            )
    except OSError:
        os.close(ready)
        raise
    finally:
        os.close(report)
    return PreloadedSupervisor(process, ready)


def _await_ready(process: subprocess.Popen[bytes], ready: int, directory: StateDirectory) -> None:
    readable, _, _ = select.select([ready], [], [], _READY_TIMEOUT_S)
    answer = os.read(ready, 64) if readable else b""
    # "ready": the supervisor runs. "other": another supervisor has the lock and must be woken for the new work.
    if answer in (b"ready", b"other"):
        detach(process)
        if answer == b"other":
            wake(directory)
        return
    problem = "ended while it was starting" if readable else f"is not ready after {_READY_TIMEOUT_S:.0f} s"
    log = directory.supervisor_log
    raise SupervisorError(
        f"the supervisor {problem}; new workflows and requests are stored, and take effect as soon as a supervisor is ready",
        hint=f"`distflow workflow list` starts it again if it has ended; its log: {log}\n{_last_line(log)}",
    )


def detach(process: subprocess.Popen[bytes]) -> None:
    """Let a child process outlive this one. If this process runs longer, as in a notebook, reap the child when it ends."""

    def reap(pid: int) -> None:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, 0)

    process.returncode = 0  # otherwise Python warns at its exit that the child still runs
    threading.Thread(target=reap, args=(process.pid,), daemon=True).start()


def wake(directory: StateDirectory) -> None:
    """Make a running supervisor read the store now; do nothing if there is none."""
    with (
        contextlib.suppress(OSError),
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as wake_socket,
        _address(directory) as address,
    ):
        wake_socket.setblocking(False)
        wake_socket.sendto(b"wake", address)


def open_wake_socket(directory: StateDirectory) -> socket.socket | None:
    """Return the socket on which the supervisor is woken. Only the holder of the lock may call this.

    Returns ``None`` if the socket cannot be created, for example on a file system without sockets. The supervisor then finds
    new work a few seconds later, when it polls the store.
    """
    wake_socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        with _address(directory) as address:
            directory.socket.unlink(missing_ok=True)
            wake_socket.bind(address)
    except OSError:
        wake_socket.close()
        return None
    return wake_socket


@contextlib.contextmanager
def _address(directory: StateDirectory) -> Iterator[str]:
    """Yield an address of the socket. For a path that is too long, it uses a file descriptor, which only Linux supports."""
    if len(os.fsencode(directory.socket)) <= _MAX_ADDRESS:
        yield str(directory.socket)
        return
    handle = os.open(directory.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{handle}/{directory.socket.name}"
    finally:
        os.close(handle)


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _trim(path: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        if path.stat().st_size > _LOG_LIMIT:
            os.replace(path, path.with_suffix(".log.1"))


def _last_line(path: Path) -> str:
    with contextlib.suppress(OSError):
        lines = path.read_text(errors="replace").strip().splitlines()
        return lines[-1] if lines else ""
    return ""
