"""Detect changes of local files and decide when to copy them. Callers pass the current time."""

from __future__ import annotations

import os
from collections.abc import Mapping

__all__ = ["CopySchedule", "Snapshot", "take_snapshot"]

Snapshot = Mapping[str, tuple[int, int, int]]
"""The modification time (ns), size (bytes) and mode of each path."""


def take_snapshot(path: str) -> Snapshot:
    """Return a snapshot of a file, or of a directory and everything below it.

    Links are not followed. Files that disappear during the scan are left out.
    """
    found: dict[str, tuple[int, int, int]] = {}
    _add_status(path, found)
    for folder, folders, files in os.walk(path):
        for name in (*folders, *files):
            _add_status(os.path.join(folder, name), found)
    return found


def _add_status(path: str, found: dict[str, tuple[int, int, int]]) -> None:
    try:
        status = os.lstat(path)
    except OSError:
        return
    # The modification time of a directory changes when an entry is added or removed.
    found[path] = (status.st_mtime_ns, status.st_size, status.st_mode)


class CopySchedule:
    """Decides when to copy: at first, after changes have settled, and at regular intervals. Times are in seconds."""

    def __init__(self, debounce_s: float, reconcile_s: float) -> None:
        """Start without a snapshot and without a copy.

        Args:
            debounce_s: The time without further changes before a change is copied.
            reconcile_s: The interval after which files are copied even without a detected change.

        """
        self._debounce_s = debounce_s
        self._reconcile_s = reconcile_s
        self._seen: Snapshot | None = None
        self._changed_at: float | None = None
        self._copied_at: float | None = None

    def saw(self, snapshot: Snapshot, now: float) -> None:
        """Compare a new snapshot with the previous one."""
        if self._seen is not None and snapshot != self._seen:
            self._changed_at = now
        self._seen = snapshot

    def is_due(self, now: float) -> bool:
        """Return whether to copy now."""
        if self._copied_at is None or now - self._copied_at >= self._reconcile_s:
            return True
        return self._changed_at is not None and now - self._changed_at >= self._debounce_s

    def copied(self, now: float) -> None:
        """Record the start of a copy. A failed copy is repeated at the next interval or change."""
        self._copied_at = now
        self._changed_at = None

    def forget_copies(self) -> None:
        """Make a copy due at once, because a new attempt has an empty directory."""
        self._copied_at = None
