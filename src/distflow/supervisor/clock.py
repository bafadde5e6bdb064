"""The clock that decisions use; tests replace it by one that they can set."""

from __future__ import annotations

from typing import Protocol

from distflow.backends import steady

__all__ = ["Clock", "SystemClock"]


class Clock(Protocol):
    """A clock."""

    def now(self) -> float:
        """Return seconds since the epoch (UTC)."""
        ...


class SystemClock:
    """This machine's clock when the process began, plus the time elapsed since then: it never jumps."""

    def now(self) -> float:
        """Return seconds since the epoch (UTC)."""
        return steady.now()
