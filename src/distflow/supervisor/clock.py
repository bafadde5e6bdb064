"""The clock that decisions are made by, so that tests can turn it."""

from __future__ import annotations

from typing import Protocol

from distflow.backends import steady

__all__ = ["Clock", "SystemClock"]


class Clock(Protocol):
    """Tells the time."""

    def now(self) -> float:
        """Return seconds since the epoch (UTC)."""
        ...


class SystemClock:
    """This machine's clock as it was when the process began, and the time elapsed since: it never jumps."""

    def now(self) -> float:
        """Return seconds since the epoch (UTC)."""
        return steady.now()
