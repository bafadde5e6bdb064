"""The background process: take the lock, open everything that the supervisor needs, and report when it runs."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Collection
from pathlib import Path

from distflow.backends import steady
from distflow.backends.base import AttemptKey, Backend, Sink
from distflow.backends.registry import open_backend, preload
from distflow.documents.text import one_line
from distflow.errors import StateError, StoreTooNew
from distflow.pools.model import Pool
from distflow.state.credentials import data_credentials
from distflow.state.directory import StateDirectory, has_room, state_errors
from distflow.state.mirror import Mirror
from distflow.state.secrets import sweep_secrets
from distflow.state.store import Store
from distflow.supervisor.commands import TransferEnded, TransferMoved
from distflow.supervisor.loop import Supervisor
from distflow.supervisor.process import START, SupervisorLock, open_wake_socket
from distflow.supervisor.sending import SenderStarter, start_sender
from distflow.supervisor.transfer_threads import ThreadedTransfers
from distflow.transports.local import LocalTransport

__all__ = ["main"]

_FULL_DISK_PATIENCE_S = 86400.0
_POLL_S = 5.0


class _Logs:
    """The mirror with the interface that backends expect."""

    def __init__(self, mirror: Mirror) -> None:
        self._mirror = mirror

    def resume_position(self, key: AttemptKey, kind: str) -> tuple[str, int]:
        return self._mirror.resume_position(key.name, kind)

    def has_room(self) -> bool:
        return self._mirror.has_room()

    def write(self, key: AttemptKey, file: str, offset: int, data: bytes) -> None:
        self._mirror.write(key.name, file, offset, data)

    def record_heartbeat(self, key: AttemptKey, at: float) -> None:
        self._mirror.record_heartbeat(key.name, at)


def main(argv: list[str]) -> int:
    """Take the lock, report when the supervisor runs, and work until there is no unfinished workflow. Return the exit code.

    If another supervisor has the lock, report that and exit. With the argument ``preload``, first read lines from standard
    input and load the backends that they list (separated by commas), until the line is ``start``. Exit if standard input ends
    before that line.
    """
    directory, ready = StateDirectory(Path(argv[0])), int(argv[1])
    LocalTransport.umask = os.umask(0o077)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if len(argv) > 2:
        for line in sys.stdin:
            if line == START:
                break
            preload(line.strip().split(","))
        else:
            return 0
    gc.freeze()
    gc.enable()
    starter, lock = _Starter(ready), SupervisorLock(directory)
    while True:
        try:
            with state_errors(directory.path):
                is_taken = lock.take()
            if not is_taken:
                starter.report(b"other")
                return 0
            if _serve(directory, starter, lock):
                return 0
        except StoreTooNew as error:
            # The version that upgraded the store starts a supervisor of its own. Tasks continue.
            _log(f"handing over to a newer version: {error.message}")
            lock.release()
            return error.exit_code
        except (StateError, OSError) as error:
            _log(f"cannot continue: {one_line(error)}")
            lock.release()
            # The process that started this one waits for a report. Without one, it shows the last line of the log.
            if starter.is_waiting or not _await_room(directory):
                return 1
            _log("the disk has free space again")


class _Starter:
    """The process that started this supervisor. It waits on a pipe for the report that the supervisor runs."""

    def __init__(self, ready: int) -> None:
        self._ready = ready
        self.is_waiting = True

    def report(self, word: bytes) -> None:
        """Send the report. Later calls do nothing."""
        if self.is_waiting:
            self.is_waiting = False
            with contextlib.suppress(OSError):
                os.write(self._ready, word)
                os.close(self._ready)


def _serve(directory: StateDirectory, starter: _Starter, lock: SupervisorLock) -> bool:
    """Work until there is no unfinished workflow, and release the lock. Return whether no new work has arrived meanwhile."""
    with Store(directory.store) as store:
        skipped: Collection[str] = ()
        if store.has_unfinished():
            skipped = _work(directory, store, starter)
        else:
            starter.report(b"ready")
        lock.release()
        # A command that added work after the last check found a running supervisor, so this process must do the work.
        return not store.has_unfinished(excluded=skipped)


def _await_room(directory: StateDirectory) -> bool:
    """Wait until the full disk of the state directory has room. Return False if it was not full, or stays full for too long.

    Return False also if the directory no longer exists. Meanwhile, nodes keep the output, and a gang that fails stops without
    the supervisor.
    """
    until, pause = time.monotonic() + _FULL_DISK_PATIENCE_S, threading.Event()
    try:
        with state_errors(directory.path):
            if has_room(directory):
                return False
            while not has_room(directory):
                if time.monotonic() > until:
                    return False
                pause.wait(_POLL_S)
    except StateError as error:
        _log(f"cannot check the free space: {one_line(error)}")
        return False
    return True


def _work(directory: StateDirectory, store: Store, starter: _Starter) -> Collection[str]:
    """Work until there is no unfinished workflow. Return the skipped workflows (uuids)."""
    credentials_for = data_credentials(directory.credentials)
    mirror = Mirror(directory.logs, steady.now)  # decisions compare the times of the logs with this clock

    def open_one(pool: Pool, sink: Sink) -> Backend:
        return open_backend(pool, blobs=directory.blobs, sink=sink, logs=_Logs(mirror))

    def open_transfers(sink: Callable[[TransferMoved | TransferEnded], None]) -> ThreadedTransfers:
        return ThreadedTransfers(directory.blobs, directory.blobs.parent / "transfers", steady.now, sink, credentials_for)

    sweep_secrets(directory.secrets, store, steady.now())
    send_notifications = SenderStarter(directory, _log)
    if store.has_notifications():
        send_notifications()  # an earlier process may have been killed before it sent all of them
    supervisor = Supervisor(
        store, mirror, directory.secrets, directory.blobs, steady.now, open_one, open_transfers, _log, send_notifications
    )
    wake_socket = open_wake_socket(directory)

    def listen(wake_socket: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while wake_socket.recv(16):
                supervisor.wake()

    if wake_socket is None:
        _log("cannot create a socket in the state directory: new work is found by polling the store every few seconds")
    else:
        threading.Thread(target=listen, args=(wake_socket,), name="wake", daemon=True).start()
    starter.report(b"ready")
    _log(f"supervisor {os.getpid()} is running")
    try:
        supervisor.run()
    finally:
        if wake_socket is not None:
            wake_socket.close()
    with contextlib.suppress(OSError, StateError):
        if store.has_notifications():
            # The thread of `send_notifications` ends with this process, perhaps before it starts the sender.
            start_sender(directory)
    _log("all other workflows have ended" if supervisor.skipped else "all workflows have ended")
    return supervisor.skipped


def _log(text: str) -> None:
    stamp = time.strftime("%Y-%m-%d %H:%M:%S")
    with contextlib.suppress(OSError):  # the log may be on a full disk
        sys.stderr.write(f"{stamp} {text}\n")
        sys.stderr.flush()
