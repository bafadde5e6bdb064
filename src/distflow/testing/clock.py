"""A clock that is turned by hand."""

from __future__ import annotations

__all__ = ["FakeClock"]


class FakeClock:
    """Stands still until it is turned."""

    def __init__(self, start: float = 1_000_000_000.0) -> None:
        """Begin at ``start``, seconds since the epoch."""
        self._now = start

    def now(self) -> float:
        """Return the time it was turned to."""
        return self._now

    def advance(self, seconds: float) -> None:
        """Turn it forward."""
        self._now += seconds
