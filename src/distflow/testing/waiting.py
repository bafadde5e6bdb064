"""Helpers for tests: wait for a condition instead of a fixed time, and a clock that tests move."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

__all__ = ["FakeClock", "is_alive", "wait_until"]


_T = TypeVar("_T")
_MIN_TIMEOUT_S = 60.0


def wait_until(condition: Callable[[], _T | None], timeout_s: float = 20.0, what: str = "") -> _T:
    """Call ``condition`` until its result is true, and return the result.

    The pause after a call is nine times as long as the call, or a twentieth of the time already waited if that is longer, but
    at least 0.02 s and at most 1 s. So short calls take at most a tenth of a core. Raises ``TimeoutError`` with ``what`` after
    ``timeout_s``. Values below 60 count as 60: something that usually takes one second may take 30 s while several tests start
    processes.
    """
    timeout_s = max(timeout_s, _MIN_TIMEOUT_S)
    started = time.monotonic()
    deadline = started + timeout_s
    pause = threading.Event()
    while True:
        begun = time.monotonic()
        value = condition()
        if value:
            return value
        now = time.monotonic()
        if now > deadline:
            raise TimeoutError(f"timed out after {timeout_s:g} s waiting for: {what or condition}")
        pause.wait(min(max(0.02, 9 * (now - begun), (now - started) / 20), 1.0))


def is_alive(pid: int) -> bool:
    """Return whether a process exists and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


class FakeClock:
    """A clock that changes only when a test calls ``advance``."""

    def __init__(self, start: float = 1_000_000_000.0) -> None:
        """Begin at ``start``, seconds since the epoch."""
        self._now = start

    def now(self) -> float:
        """Return the current time, in seconds since the epoch."""
        return self._now

    def advance(self, seconds: float) -> None:
        """Move the clock forward."""
        self._now += seconds
