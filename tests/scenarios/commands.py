"""Commands of distflow in processes that are forked from a process that has imported everything.

A scenario runs dozens of commands. An interpreter that starts, imports and dismantles itself costs more than the command.
The commands are ordinary processes: each has its own arguments, environment, working directory, output and exit code.
A test of the start itself (signals, terminals, start-up time) runs ``python -m distflow`` instead.
"""

from __future__ import annotations

import atexit
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
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

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
        self._ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, __file__, str(theirs.fileno())], pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL
            )

    def close(self) -> None:
        self._ours.close()
        self._process.wait(10)

    def run(self, arguments: tuple[str, ...], environment: dict[str, str], folder: Path, timeout: float) -> Done:
        """Run one command to its end."""
        asked = json.dumps([arguments, environment, str(folder)]).encode()
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            socket.send_fds(self._ours, [asked], [out.fileno(), err.fileno()])
            pid = self._told(60)
            try:
                code = self._told(timeout)
            except TimeoutError:
                os.kill(pid, signal.SIGKILL)
                self._told(60)
                raise subprocess.TimeoutExpired(["distflow", *arguments], timeout, _read(out), _read(err)) from None
            return Done(code, _read(out).decode(), _read(err).decode())

    def _told(self, timeout: float) -> int:
        self._ours.settimeout(timeout)
        return int(self._ours.recv(32))


def _read(file: Any) -> bytes:
    file.seek(0)
    content: bytes = file.read()
    return content


def _is_to_run(connection: socket.socket) -> bool:
    """Fork for every request, and tell the pid of the command, then its exit code: true in what is to be the command."""
    for module in pkgutil.walk_packages(importlib.import_module("distflow").__path__, "distflow."):
        if not module.name.startswith(_NOT_NEEDED) and not module.name.endswith("__main__"):
            _remember_types(importlib.import_module(module.name))
    gc.collect()
    gc.freeze()  # so that no command copies all these pages when it collects garbage
    while True:
        asked, handles, _, _ = socket.recv_fds(connection, 1 << 20, 2)
        if not asked:
            return False
        pid = os.fork()
        if pid == 0:
            connection.close()
            _become(*json.loads(asked), *handles)
            return True
        for handle in handles:
            os.close(handle)
        connection.sendall(str(pid).encode())
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


def _become(arguments: list[str], environment: dict[str, str], folder: str, out: int, err: int) -> None:
    """Take the place of ``python -m distflow`` with these."""
    for handle, standard in ((out, 1), (err, 2)):
        os.dup2(handle, standard)
        os.close(handle)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = ["distflow", *arguments]


if __name__ == "__main__" and _is_to_run(socket.socket(fileno=int(sys.argv[1]))):
    from distflow.cli.entry import main

    try:
        main()
    except SystemExit as ended:
        if ended.code is None or isinstance(ended.code, int):
            _leave(ended.code or 0)
        raise
    _leave(0)
