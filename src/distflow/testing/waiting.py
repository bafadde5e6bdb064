"""Time in tests: wait for a condition with a deadline, and never for a fixed time; and a clock that tests set."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

__all__ = ["FakeClock", "is_alive", "wait_until"]


_T = TypeVar("_T")
_LEAST_S = 60.0


def wait_until(condition: Callable[[], _T | None], timeout_s: float = 20.0, what: str = "") -> _T:
    """Call ``condition`` until its result is true, and return the result.

    Pauses for four times the duration of the last check, 0.02 to 1 s, so that waiting does not slow down the awaited process.
    Raises ``TimeoutError`` naming ``what`` after ``timeout_s``, or after a minute if that is longer: what takes a second on an
    idle machine may take half a minute while several tests start processes.
    """
    timeout_s = max(timeout_s, _LEAST_S)
    deadline = time.monotonic() + timeout_s
    pause = threading.Event()
    while True:
        begun = time.monotonic()
        value = condition()
        if value:
            return value
        now = time.monotonic()
        if now > deadline:
            raise TimeoutError(f"not within {timeout_s:g} s: {what or condition}")
        pause.wait(min(max(0.02, 4 * (now - begun)), 1.0))


def is_alive(pid: int) -> bool:
    """Return whether a process runs. A zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


class FakeClock:
    """A clock that changes only when a test sets it."""

    def __init__(self, start: float = 1_000_000_000.0) -> None:
        """Begin at ``start``, seconds since the epoch."""
        self._now = start

    def now(self) -> float:
        """Return the current time, in seconds since the epoch."""
        return self._now

    def advance(self, seconds: float) -> None:
        """Move the clock forward."""
        self._now += seconds
