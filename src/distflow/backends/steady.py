"""The clock of observations and decisions. It never goes back.

It is the machine's clock at the start of this process plus the time that has elapsed since. On Linux, this includes the time in
which the machine was suspended. Changes of the machine's clock, by a person or a time server, do not affect durations: a wait
of ten seconds takes ten seconds.
"""

from __future__ import annotations

import time
from collections.abc import Callable

__all__ = ["SteadyTime", "now"]


def _elapsed() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()


class SteadyTime:
    """Seconds since the epoch (UTC) that only move forward."""

    def __init__(
        self, wall: Callable[[], float] = time.time, elapsed: Callable[[], float] = _elapsed  # noqa: TID251  read once
    ) -> None:  # fmt: skip
        """Read the machine's clock once."""
        self._elapsed = elapsed
        self._start = wall() - elapsed()

    def now(self) -> float:
        """Return seconds since the epoch (UTC)."""
        return self._start + self._elapsed()


now = SteadyTime().now
"""Return the time of this process, which all observations and decisions of a supervisor share."""
