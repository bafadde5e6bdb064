"""One point in time that bounds several steps together."""

from __future__ import annotations

import time

__all__ = ["Deadline"]


class Deadline:
    """``seconds`` from now."""

    def __init__(self, seconds: float) -> None:
        """Start the clock."""
        self.seconds = seconds
        self._end = time.monotonic() + seconds

    def left(self) -> float:
        """Return the seconds that are left; 0 when it has passed."""
        return max(0.0, self._end - time.monotonic())

    @property
    def has_passed(self) -> bool:
        """Whether nothing is left."""
        return self.left() <= 0
