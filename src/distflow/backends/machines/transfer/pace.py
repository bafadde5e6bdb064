"""The rate of a transfer, and the times to report it."""

from __future__ import annotations

import time

__all__ = ["Pace"]

_REPORT_INTERVAL_S = 1.0


class Pace:
    """The rate of a transfer from now on. Data that is there at first does not count."""

    def __init__(self) -> None:
        """Start the clock."""
        self._began_at = self._reported_at = time.monotonic()
        self._first: int | None = None

    def begin(self, done: int) -> None:
        """Restart the count at ``done`` bytes."""
        self._began_at, self._first = time.monotonic(), done

    def due(self, done: int) -> float | None:
        """Return bytes per second once a second, when a report is due; else ``None``."""
        if self._first is None:
            self._first = done
        at = time.monotonic()
        if at - self._reported_at < _REPORT_INTERVAL_S:
            return None
        self._reported_at = at
        return (done - self._first) / max(at - self._began_at, 0.001)
