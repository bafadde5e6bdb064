"""Commands and supervisors of distflow that are forked from a process that has imported everything.

A scenario runs dozens of commands and starts a supervisor or two. An interpreter that starts, imports and dismantles itself
costs more than most of them. The forked processes are ordinary processes: each has its own arguments, environment, working
directory, output and exit code. A supervisor also has a session of its own, and outlives the command that starts it.
A test of the start itself (signals, terminals, start-up time) runs ``python -m distflow`` instead.
"""

from __future__ import annotations

import atexit
import ctypes
import dataclasses
import gc
import importlib
import json
import os
import pkgutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import IO, Any, NoReturn

import msgspec

__all__ = ["Commands", "Done"]

_NOT_NEEDED = ("distflow.train", "distflow.runtime", "distflow.testing", "distflow.distributed")


@dataclass(frozen=True, slots=True)
class Done:
    """A command that ended."""

    code: int
    out: str
    err: str


class Commands:
    """The process that commands are forked from; it ends with the one that made it."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            # The last argument and the variable reserve the memory in which a forked supervisor shows its own ones.
            self._process = subprocess.Popen(
                [sys.executable, __file__, str(theirs.fileno()), "-" * 1024], pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL, env={**os.environ, "RESERVED": "-" * 8192},
            )  # fmt: skip

    def close(self) -> None:
        self._socket.close()
        self._process.wait(60)

    def run(self, arguments: tuple[str, ...], environment: dict[str, str], folder: Path, timeout: float) -> Done:
        """Run one command to its end."""
        request = json.dumps([arguments, environment, str(folder)]).encode()
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            socket.send_fds(self._socket, [request], [out.fileno(), err.fileno()])
            pid = self._receive(60)
            try:
                code = self._receive(timeout)
            except TimeoutError:
                os.kill(pid, signal.SIGKILL)
                self._receive(60)
                raise subprocess.TimeoutExpired(["distflow", *arguments], timeout, _read(out), _read(err)) from None
            return Done(code, _read(out).decode(), _read(err).decode())

    def _receive(self, timeout: float) -> int:
        self._socket.settimeout(timeout)
        return int(self._socket.recv(32))


def _read(file: Any) -> bytes:
    file.seek(0)
    content: bytes = file.read()
    return content


def _serve(connection: socket.socket) -> Callable[[], int]:
    """Fork for each request. Return the main function of the process: of a command, of a supervisor, or of this process."""
    for module in pkgutil.walk_packages(importlib.import_module("distflow").__path__, "distflow."):
        if not module.name.startswith(_NOT_NEEDED) and not module.name.endswith("__main__"):
            _remember_types(importlib.import_module(module.name))
    for name in ("jsonschema", "encodings.idna", "s3fs"):  # distflow imports them when it needs them
        with suppress(ImportError):
            importlib.import_module(name)
    gc.collect()
    gc.freeze()  # so that no command copies all these pages when it collects garbage
    with connection:
        while True:
            request, handles = _receive(connection)
            if not request:
                return lambda: 0
            supervisors, starter = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with supervisors:
                pid = os.fork()
                if pid == 0:
                    return partial(_run_command, starter, handles, *json.loads(request))
                starter.close()
                _close(handles)
                connection.sendall(str(pid).encode())
                while True:  # until the command ends, and its `starter` with it
                    request, handles = _receive(supervisors)
                    if not request:
                        break
                    if _fork_orphan():
                        return partial(_run_supervisor, handles, *json.loads(request))
                    _close(handles)
                    with suppress(OSError):
                        supervisors.sendall(b"forked")
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            with suppress(OSError):
                connection.sendall(str(code).encode())


def _remember_types(module: ModuleType) -> None:
    """Let msgspec inspect the dataclasses of a module: it does that once per process and class, before it decodes the first."""
    for kind in vars(module).values():
        if isinstance(kind, type) and kind.__module__ == module.__name__ and dataclasses.is_dataclass(kind):
            with suppress(Exception):  # not every class can be decoded
                msgspec.convert({}, kind)


def _leave(code: int) -> NoReturn:
    """Exit as the interpreter does, but leave it to the kernel to free the memory of some hundred modules."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _receive(connection: socket.socket) -> tuple[bytes, list[int]]:
    """Return the next request, which is empty if the other end is closed, and the descriptors that came with it."""
    try:
        return socket.recv_fds(connection, 1 << 20, 3)[:2]
    except ConnectionResetError:  # a command was killed before it read the answer
        return b"", []


def _close(handles: Iterable[int]) -> None:
    for handle in handles:
        os.close(handle)


def _fork_orphan() -> bool:
    """Return True in a new process with a session of its own, which is not a child of this one."""
    child = os.fork()
    if child:
        os.waitpid(child, 0)
        return False
    if os.fork():
        os._exit(0)
    os.setsid()
    return True


def _run_command(
    starter: socket.socket, handles: list[int], arguments: list[str], environment: dict[str, str], folder: str
) -> int:
    """Run what ``python -m distflow`` runs with these."""
    from distflow.cli.entry import main
    from distflow.supervisor import process

    _become(handles, (1, 2), environment, folder)
    sys.argv = ["distflow", *arguments]
    popen = partial(_start_supervisor, starter)
    vars(process)["subprocess"] = SimpleNamespace(Popen=popen, DEVNULL=subprocess.DEVNULL, PIPE=subprocess.PIPE)
    main()
    return 0


def _start_supervisor(
    starter: socket.socket, command: list[str], *, stdin: int, stdout: IO[bytes], pass_fds: tuple[int], **_: Any
) -> SimpleNamespace:
    """Have a supervisor forked where distflow starts an interpreter. Return the part of a ``Popen`` that distflow uses."""
    read, write = os.pipe() if stdin == subprocess.PIPE else (os.open(os.devnull, os.O_RDONLY), None)
    socket.send_fds(starter, [json.dumps([command, dict(os.environ)]).encode()], [read, stdout.fileno(), *pass_fds])
    os.close(read)
    starter.recv(16)
    given = None if write is None else open(write, "wb", buffering=0)
    # It is not a child of this process: it ends when its standard input does, and nothing is left to reap.
    end = given.close if given is not None else None
    return SimpleNamespace(stdin=given, returncode=None, pid=os.getpid(), kill=end, communicate=lambda: None)


def _run_supervisor(handles: list[int], command: list[str], environment: dict[str, str]) -> int:
    """Run what the command ``python -m distflow.supervisor STATE_DIRECTORY READY_FD …`` runs."""
    from distflow.supervisor.__main__ import _main

    read, log, ready = handles
    _show(command, [f"{name}={value}" for name, value in environment.items()])
    _become([read, log, os.dup(log)], (0, 1, 2), environment, "/")
    sys.argv = ["distflow.supervisor", command[3], str(ready), *command[5:]]
    return _main()


def _show(*texts: list[str]) -> None:
    """Show these arguments and this environment in /proc, where other processes read them from the memory of this one."""
    ends = [int(field) for field in Path("/proc/self/stat").read_text().rpartition(")")[2].split()[45:49]]
    for (start, end), values in zip((ends[:2], ends[2:]), texts, strict=True):
        size = end - start
        content = b"".join(os.fsencode(value) + b"\0" for value in values)
        ctypes.memmove(start, content[: size - 1].ljust(size, b"\0"), size)


def _become(handles: Iterable[int], standard: Iterable[int], environment: dict[str, str], folder: str) -> None:
    """Take these as standard input, output or error, as environment and as working directory."""
    for handle, number in zip(handles, standard, strict=True):
        os.dup2(handle, number)
        os.close(handle)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)


if __name__ == "__main__":
    run = _serve(socket.socket(fileno=int(sys.argv[1])))
    try:
        _leave(run())
    except SystemExit as ended:
        if ended.code is None or isinstance(ended.code, int):
            _leave(ended.code or 0)
        raise
