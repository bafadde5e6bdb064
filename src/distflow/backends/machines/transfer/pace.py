"""How fast something goes, and when to say so."""

from __future__ import annotations

import time

__all__ = ["Pace"]

_TOLD_EVERY_S = 1.0


class Pace:
    """The pace of a transfer from now on; what is there at first counts for nothing."""

    def __init__(self) -> None:
        """Start the clock."""
        self._begun = self._told = time.monotonic()
        self._first: int | None = None

    def begin(self, done: int) -> None:
        """Count anew from ``done`` bytes."""
        self._begun, self._first = time.monotonic(), done

    def due(self, done: int) -> float | None:
        """Return bytes a second when it is time to tell again, every second; else ``None``."""
        if self._first is None:
            self._first = done
        at = time.monotonic()
        if at - self._told < _TOLD_EVERY_S:
            return None
        self._told = at
        return (done - self._first) / max(at - self._begun, 0.001)
