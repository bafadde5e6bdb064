"""The processes that copy files to running tasks in the background: at most one for each task, known by a lock.

A folder of mode 0700 has three files of mode 0600 for each: ``<workflow uuid>-<task>.json`` is the record, ``.lock`` is locked
for as long as the process lives, and ``.log`` is what it says. Whoever holds the lock writes the record, and nobody else.
"""

from __future__ import annotations

import os
import signal
import threading
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from distflow.state.codec import DecodeError, decode, encode
from distflow.state.directory import is_locked, lock_at_once, state_errors

__all__ = ["Sync", "Syncs"]

_STOP_S = 10.0
_LOOK_S = 0.02
_KEPT_S = 14 * 86400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Sync:
    """What is copied to one task, how, and how far it is."""

    workflow: str
    """The uuid of the workflow."""
    workflow_id: str
    task: str
    local: str
    """What is watched: an absolute path, as rsync takes it."""
    remote: str
    """Where it goes, as rsync takes it: relative to the task's working directory, or absolute."""
    options: tuple[str, ...] = ()
    """rsync's own."""
    connect_timeout_s: int = 60
    poll_s: float
    """Between two looks at the files here."""
    debounce_s: float
    """How long nothing must have changed before a change is copied."""
    reconcile_s: float
    """After so long, it is copied also when no change was seen, or when the changes do not end."""
    max_log_size: int
    """Bytes of the log, and as many of the one before it."""
    pid: int = 0
    synced_at: float | None = None
    """When the last copy ended well."""
    error: str = ""
    """Why the last copy did not; empty when it did."""
    ended_at: float | None = None


class Syncs:
    """The records, locks and logs below one folder."""

    def __init__(self, folder: Path) -> None:
        """Use ``folder``, which may not exist yet."""
        self._folder = folder

    def ensure(self) -> None:
        """Make the folder. Raises ``StateError``."""
        with state_errors(self._folder):
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)

    def log(self, sync: Sync) -> Path:
        """Return where the process of a task writes."""
        return self._path(sync, "log")

    def take(self, sync: Sync) -> int | None:
        """Become the one that copies to a task: return the handle that locks it, or ``None`` when another process does."""
        handle = os.open(self._path(sync, "lock"), os.O_RDWR | os.O_CREAT, 0o600)
        if lock_at_once(handle):
            return handle
        os.close(handle)
        return None

    def write(self, sync: Sync) -> None:
        """Keep the record; only for who holds the lock. Raises ``StateError``."""
        path = self._path(sync, "json")
        new = path.with_suffix(".new")
        with state_errors(self._folder):
            with open(new, "wb", opener=_private) as file:
                file.write(encode(sync))
            os.replace(new, path)

    def is_running(self, sync: Sync) -> bool:
        """Return whether a process copies to that task."""
        return is_locked(self._path(sync, "lock"))

    def list(self) -> list[Sync]:
        """Return all that are known, in the order of their workflows and tasks; a damaged record is passed over."""
        found = [sync for path in self._folder.glob("*.json") if (sync := _read(path)) is not None]
        return sorted(found, key=lambda one: (one.workflow_id, one.task))

    def stop(self, sync: Sync) -> None:
        """End the process of a task, first with SIGTERM, and return when it is gone."""
        for signum in (signal.SIGTERM, signal.SIGKILL):
            self._signal(sync, signum)
            pause = threading.Event()
            for _ in range(round(_STOP_S / _LOOK_S)):
                if not self.is_running(sync):
                    return
                pause.wait(_LOOK_S)

    def forget(self, now: float) -> None:
        """Remove what is left of those that ended long ago."""
        for sync in self.list():
            if sync.ended_at is not None and now - sync.ended_at > _KEPT_S and not self.is_running(sync):
                for kind in ("json", "log", "log.1", "lock"):
                    self._path(sync, kind).unlink(missing_ok=True)

    def _signal(self, sync: Sync, signum: int) -> None:
        with suppress(ProcessLookupError, OSError):
            # The handle names this very process, also when it ends now and another one gets its number.
            process = os.pidfd_open((_read(self._path(sync, "json")) or sync).pid)
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


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
