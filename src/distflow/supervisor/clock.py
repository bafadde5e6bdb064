"""The clock that decisions are made by, so that tests can turn it."""

from __future__ import annotations

import time
from typing import Protocol

__all__ = ["Clock", "SystemClock"]


class Clock(Protocol):
    """Tells the time."""

    def now(self) -> float:
        """Return seconds since the epoch (UTC)."""
        ...


class SystemClock:
    """This machine's clock."""

    def now(self) -> float:
        """Return seconds since the epoch (UTC)."""
        return time.time()  # noqa: TID251  the one place that may ask
