"""The background processes that copy files to running tasks: at most one for each task, which holds a lock.

A folder of mode 0700 has files of mode 0600 for each process. ``<workflow uuid>-<task>.json`` is the record, ``.lock`` is
locked while the process lives, and ``.log`` is its log, which is rotated to ``.log.1``. Only the process that holds the lock
writes the record.
"""

from __future__ import annotations

import os
import signal
import threading
from contextlib import suppress
from pathlib import Path

from msgspec import Struct

from distflow.state.codec import DecodeError, decode, encode
from distflow.state.directory import is_locked, state_errors, try_lock, write_private

__all__ = ["Sync", "Syncs"]

_STOP_S = 10.0
_POLL_S = 0.02
_KEPT_S = 14 * 86400.0


class Sync(Struct, frozen=True, kw_only=True):
    """The settings and the progress of copying to one task."""

    workflow: str
    """The uuid of the workflow."""
    workflow_id: str
    task: str
    local: str
    """The watched files: an absolute path in rsync's syntax."""
    remote: str
    """The destination in rsync's syntax: relative to the task's working directory, or absolute."""
    options: tuple[str, ...] = ()
    """Options of rsync."""
    connect_timeout_s: int = 60
    poll_s: float
    """Seconds between two polls of the local files."""
    debounce_s: float
    """Seconds without a change before a change is copied."""
    reconcile_s: float
    """Seconds after which files are copied even if no change was seen, or if the changes do not end."""
    max_log_size: int
    """The maximum size of the log, and of the rotated log, in bytes."""
    pid: int = 0
    synced_at: float | None = None
    """The time at which the last successful copy ended."""
    error: str = ""
    """The reason why the last copy failed; empty if it succeeded."""
    ended_at: float | None = None


class Syncs:
    """The records, locks and logs below one folder."""

    def __init__(self, folder: Path) -> None:
        """Use ``folder``, which may not exist yet."""
        self._folder = folder

    def ensure(self) -> None:
        """Create the folder. Raises ``StateError``."""
        with state_errors(self._folder):
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)

    def log(self, sync: Sync) -> Path:
        """Return the path of the log of a task's process."""
        return self._path(sync, "log")

    def take(self, sync: Sync) -> int | None:
        """Take the lock of a task and return its handle, or ``None`` if another process copies to the task.

        Raises ``StateError``.
        """
        with state_errors(self._folder):
            handle = os.open(self._path(sync, "lock"), os.O_RDWR | os.O_CREAT, 0o600)
            if try_lock(handle):
                return handle
            os.close(handle)
        return None

    def write(self, sync: Sync) -> None:
        """Write the record; only the holder of the lock may do so. Raises ``StateError``."""
        with state_errors(self._folder):
            write_private(self._path(sync, "json"), encode(sync))

    def is_running(self, sync: Sync) -> bool:
        """Return whether a process copies to that task."""
        return is_locked(self._path(sync, "lock"))

    def list(self) -> list[Sync]:
        """Return all records, ordered by workflow and task; damaged records are skipped."""
        found = [sync for path in self._folder.glob("*.json") if (sync := _read(path)) is not None]
        return sorted(found, key=lambda one: (one.workflow_id, one.task))

    def stop(self, sync: Sync) -> None:
        """End the process that copies to a task: with SIGTERM, and with SIGKILL if it still runs after 10 s.

        Returns when the process is gone, or 10 s after SIGKILL.
        """
        for signum in (signal.SIGTERM, signal.SIGKILL):
            self._signal(sync, signum)
            pause = threading.Event()
            for _ in range(round(_STOP_S / _POLL_S)):
                if not self.is_running(sync):
                    return
                pause.wait(_POLL_S)

    def forget(self, now: float) -> None:
        """Remove the files of processes that ended more than two weeks ago."""
        for sync in self.list():
            if sync.ended_at is not None and now - sync.ended_at > _KEPT_S and not self.is_running(sync):
                for kind in ("json", "log", "log.1", "lock"):
                    self._path(sync, kind).unlink(missing_ok=True)

    def _signal(self, sync: Sync, signum: int) -> None:
        pid = (_read(self._path(sync, "json")) or sync).pid
        with suppress(ProcessLookupError, OSError):
            if not hasattr(os, "pidfd_open"):  # macOS
                if self.is_running(sync):
                    os.kill(pid, signum)
                return
            # The descriptor refers to this very process, even if it ends now and its process id is reused.
            process = os.pidfd_open(pid)
            try:
                if self.is_running(sync):
                    signal.pidfd_send_signal(process, signum)
            finally:
                os.close(process)

    def _path(self, sync: Sync, kind: str) -> Path:
        return self._folder / f"{sync.workflow}-{sync.task}.{kind}"


def _read(path: Path) -> Sync | None:
    with suppress(OSError, DecodeError):
        return decode(path.read_bytes(), Sync)
    return None
