"""The background process: takes the lock, opens what the supervisor works with, and says when it is at work."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from distflow.backends.base import AttemptKey, Backend, Observation
from distflow.backends.registry import open_backend, preload
from distflow.pools.model import Pool
from distflow.state.directory import StateDirectory
from distflow.state.mirror import Mirror
from distflow.state.secrets import sweep_secrets
from distflow.state.store import Store
from distflow.state.storekeys import kept_in
from distflow.supervisor.clock import SystemClock
from distflow.supervisor.loop import Supervisor
from distflow.supervisor.process import Lock, open_wake_socket

__all__ = ["main"]


class _Logs:
    """The mirror, as backends want it."""

    def __init__(self, mirror: Mirror) -> None:
        self._mirror = mirror

    def size(self, key: AttemptKey, file: str) -> int:
        return self._mirror.size(key.name, file)

    def write(self, key: AttemptKey, file: str, offset: int, data: bytes) -> None:
        self._mirror.write(key.name, file, offset, data)

    def beat(self, key: AttemptKey, at: float) -> None:
        self._mirror.beat(key.name, at)


def main(argv: list[str]) -> int:
    """Take the lock, say so, and work until nothing is unfinished.

    With ``BACKENDS`` (their names, joined by commas) load them and wait for a byte of standard input first.
    """
    directory, ready = StateDirectory(Path(argv[0])), int(argv[1])
    os.umask(0o077)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if len(argv) > 2:
        preload(argv[2].split(","))
        if not os.read(0, 1):
            return 0
    gc.freeze()
    gc.enable()
    lock = Lock(directory.lock)
    while True:
        if not lock.take():
            _say(ready, b"other")
            return 0
        with Store(directory.store) as store:
            if store.has_unfinished():
                _work(directory, store, ready)
            else:
                _say(ready, b"ready")
            ready = -1
            lock.give_up()
            # Work that came after the last look found the lock taken, so it is ours.
            if not store.has_unfinished():
                return 0


def _work(directory: StateDirectory, store: Store, ready: int) -> None:
    mirror = Mirror(directory.logs)

    def open_one(pool: Pool, sink: Callable[[Observation], None]) -> Backend:
        return open_backend(pool, blobs=directory.blobs, sink=sink, logs=_Logs(mirror))

    keys, clock = kept_in(directory.credentials), SystemClock()
    sweep_secrets(directory.secrets, store, clock.now())
    supervisor = Supervisor(store, mirror, directory.secrets, directory.blobs, clock, open_one, _log, keys)
    knock = open_wake_socket(directory)

    def listen() -> None:
        with contextlib.suppress(OSError):
            while knock.recv(16):
                supervisor.wake()

    threading.Thread(target=listen, name="wake", daemon=True).start()
    _say(ready, b"ready")
    _log(f"supervisor {os.getpid()} at work")
    try:
        supervisor.run()
    finally:
        knock.close()
    _log("nothing left to do")


def _say(ready: int, word: bytes) -> None:
    """Tell who started us; nothing when that was done already (-1)."""
    if ready >= 0:
        with contextlib.suppress(OSError):
            os.write(ready, word)
            os.close(ready)


def _log(text: str) -> None:
    stamp = time.strftime("%Y-%m-%d %H:%M:%S")
    sys.stderr.write(f"{stamp} {text}\n")
    sys.stderr.flush()
