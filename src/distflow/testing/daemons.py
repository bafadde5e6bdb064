"""Daemons for tests: how they start, and the ports on which they listen."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import socket
import subprocess
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

__all__ = ["DAEMON_PATH", "free_port", "start_daemon"]

DAEMON_PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin:/sbin"
"""The directories to search for daemons."""


def free_port(address: str = "127.0.0.1", count: int = 1) -> int:
    """Return the first of ``count`` consecutive ports that are free at ``address`` now. An empty address means all addresses.

    The ports are above the range of Ray's workers. They are also below Linux's default range for outgoing connections, so no
    connection takes them before the caller listens on them.
    """
    while True:
        first = secrets.choice(range(20_000, 32_000 - count))
        with contextlib.ExitStack() as probes, contextlib.suppress(OSError):
            for port in range(first, first + count):
                probes.enter_context(socket.socket()).bind((address, port))
            return first


def start_daemon(
    argv: Sequence[str], log: Path, *, cwd: Path | None = None, env: Mapping[str, str] | None = None
) -> subprocess.Popen[bytes]:
    """Start a program that runs until it is stopped. Its output is appended to ``log``.

    If the main thread starts it, it gets SIGTERM when this process ends. This needs ``setpriv`` of util-linux. A ``preexec_fn``
    would not need ``setpriv``, but then the kernel copies the page tables of this process, which takes 40 ms with torch.
    """
    setpriv = shutil.which("setpriv", path=DAEMON_PATH) if threading.current_thread() is threading.main_thread() else None
    with log.open("ab") as output:
        return subprocess.Popen(
            [setpriv, "--pdeathsig", "TERM", *argv] if setpriv is not None else list(argv),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
            cwd=cwd,
            env=env,
        )
