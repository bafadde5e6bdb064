"""Run the same action on many nodes in parallel and collect one result or one error for each."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from distflow.errors import DistflowError
from distflow.transports.base import Transport

__all__ = ["Outcome", "fan_out"]

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome(Generic[T]):
    """The result of the action on one node: a value or an error."""

    node: str
    value: T | None = None
    error: DistflowError | None = None

    @property
    def is_ok(self) -> bool:
        """Whether the action ended without an error."""
        return self.error is None


def fan_out(transports: Sequence[Transport], action: Callable[[Transport], T], *, limit: int = 64) -> tuple[Outcome[T], ...]:
    """Call ``action`` for every transport, at most ``limit`` at a time, and return the outcomes in their order.

    A ``DistflowError`` becomes an outcome. Any other exception is a bug, and is raised after all actions have ended. A keyboard
    interrupt does not wait for them.
    """
    left: queue.SimpleQueue[int] = queue.SimpleQueue()
    for number in range(len(transports)):
        left.put(number)
    ended: queue.SimpleQueue[tuple[int, Outcome[T] | BaseException]] = queue.SimpleQueue()

    def work() -> None:
        while True:
            try:
                number = left.get_nowait()
            except queue.Empty:
                return
            transport = transports[number]
            try:
                ended.put((number, Outcome(node=transport.name, value=action(transport))))
            except DistflowError as error:
                ended.put((number, Outcome(node=transport.name, error=error)))
            except BaseException as error:  # noqa: BLE001  raised again in the caller's thread
                ended.put((number, error))

    for number in range(min(limit, len(transports))):
        threading.Thread(target=work, name=f"fan-out {number}", daemon=True).start()
    found = dict(ended.get() for _ in transports)
    outcomes = []
    for number in range(len(transports)):
        outcome = found[number]
        if isinstance(outcome, BaseException):
            raise outcome
        outcomes.append(outcome)
    return tuple(outcomes)
