"""Second tries with back-off, many transfers at once, and how far they are together."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from typing import TypeVar

from distflow.errors import StorageUnreachable
from distflow.storage.base import Progress
from distflow.storage.failures import Halted

__all__ = ["TRIES", "Gauge", "Patience", "for_all"]

TRIES = 5
"""As OSMO has it; a try that brought something begins the count anew."""
_PAUSES_S = (0.5, 1.0, 2.0, 4.0)

_T = TypeVar("_T")
_R = TypeVar("_R")


class Patience:
    """How often a thing is tried, until it is called off."""

    def __init__(self, halt: threading.Event | None = None, pauses_s: Sequence[float] = _PAUSES_S) -> None:
        """Wait ``pauses_s`` between tries, one try more than there are pauses; ``halt`` ends everything."""
        self.halt = halt or threading.Event()
        self._pauses_s = pauses_s

    def check(self) -> None:
        """Raise ``Halted`` when nobody waits any more."""
        if self.halt.is_set():
            raise Halted

    def keep_trying(self, act: Callable[[], _R], moved: Callable[[], int] = lambda: 0) -> _R:
        """Return what ``act`` returns, at the latest at the last try; one after which ``moved`` is more counts for nothing."""
        failures, before = 0, moved()
        while True:
            self.check()
            try:
                return act()
            except StorageUnreachable as error:
                failures = 0 if moved() > before else failures + 1
                before = moved()
                if failures > len(self._pauses_s):
                    error.message = f"{error.message} (tried {failures} times)"
                    raise
                self.halt.wait(self._pauses_s[max(0, failures - 1)] if self._pauses_s else 0.0)


class Gauge:
    """How many bytes of all are done; may be told from several threads."""

    def __init__(self, total: int, told: Progress) -> None:
        """Begin at nothing."""
        self.total = total
        self.done = 0
        self._told = told
        self._lock = threading.Lock()
        told(0, total)

    def add(self, count: int) -> None:
        """Note some more bytes; fewer when they have to come again."""
        with self._lock:
            self.done += count
            self._told(min(self.done, self.total), self.total)


def for_all(items: Sequence[_T], act: Callable[[_T], _R], at_once: int, patience: Patience) -> list[_R]:
    """Do it for all, some at a time; the first failure calls off the rest and is raised when they have stopped."""
    with ThreadPoolExecutor(max_workers=max(1, min(at_once, len(items) or 1)), thread_name_prefix="data") as workers:
        doing = [workers.submit(act, item) for item in items]
        try:
            wait(doing, return_when=FIRST_EXCEPTION)
            failed = next((one.exception() for one in doing if one.done() and one.exception()), None)
        except BaseException:
            patience.halt.set()
            raise
        if failed is not None:
            patience.halt.set()
            for one in doing:
                one.cancel()
            raise failed
    return [one.result() for one in doing]
