"""Changes of local files, and when it is time to copy them. Reads directories; has no clock of its own."""

from __future__ import annotations

import os
from collections.abc import Mapping

__all__ = ["CopySchedule", "Snapshot", "take_snapshot"]

Snapshot = Mapping[str, tuple[int, int, int]]
"""Each path with its time of change (ns), its size (bytes) and its mode."""


def take_snapshot(path: str) -> Snapshot:
    """Return what is there: a file, or a directory with all below it; links are not followed, and what vanishes is left out."""
    found: dict[str, tuple[int, int, int]] = {}
    _note(path, found)
    for folder, folders, files in os.walk(path):
        for name in (*folders, *files):
            _note(os.path.join(folder, name), found)
    return found


def _note(path: str, found: dict[str, tuple[int, int, int]]) -> None:
    try:
        status = os.lstat(path)
    except OSError:
        return
    # A directory's size says nothing, and its time changes with the names in it.
    found[path] = (status.st_mtime_ns, status.st_size, status.st_mode)


class CopySchedule:
    """When to copy: at first, after a change and some rest, and now and then in any case. Times are in seconds."""

    def __init__(self, debounce_s: float, reconcile_s: float) -> None:
        """Nothing was seen yet, and nothing copied."""
        self._debounce_s = debounce_s
        self._reconcile_s = reconcile_s
        self._seen: Snapshot | None = None
        self._changed_at: float | None = None
        self._copied_at: float | None = None

    def saw(self, snapshot: Snapshot, now: float) -> None:
        """Take in what is there now."""
        if self._seen is not None and snapshot != self._seen:
            self._changed_at = now
        self._seen = snapshot

    def is_due(self, now: float) -> bool:
        """Return whether it is time."""
        if self._copied_at is None or now - self._copied_at >= self._reconcile_s:
            return True
        return self._changed_at is not None and now - self._changed_at >= self._debounce_s

    def copied(self, now: float) -> None:
        """Take in that a copy began at ``now``, of what was there; what failed is tried again when it is due again."""
        self._copied_at = now
        self._changed_at = None

    def forget_copies(self) -> None:
        """Forget what was copied: another attempt has another directory."""
        self._copied_at = None
