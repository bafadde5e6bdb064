"""Having nodes bring outputs to stores: asked for again until it is done, or it is known that it cannot be done there."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from distflow.backends.base import AttemptKey
from distflow.backends.machines.connection.node_connection import Connection
from distflow.errors import TransportError
from distflow.storage.base import Progress
from distflow.storage.credentials import Identity
from distflow.storage.failures import TransferCanceled
from distflow.storage.task_data import Delivered, Delivery, RelayRequired

__all__ = ["Deliverer"]

_TRIES = 5
"""Connections that may end one after the other without having brought anything, while the node itself answers."""
_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 5.0


class Deliverer:
    """Has outputs delivered, of each node one at a time."""

    def __init__(self, patience_s: float) -> None:
        """Begin nothing. ``patience_s``: for how long connections may fail while the node's agent still answers."""
        self._patience_s = patience_s
        self._lock = threading.Lock()
        self._turns: dict[str, threading.Lock] = {}

    def deliver(
        self, connection: Connection, key: AttemptKey, delivery: Delivery, identity: Identity, halt: threading.Event,
        told: Progress,
    ) -> Delivered:  # fmt: skip
        """Return when the whole output is delivered; wait for an unreachable node.

        Raises as ``deliver_there`` does, and ``TransferCanceled``.
        """
        tries = furthest = 0
        since = time.monotonic()
        while True:
            progress = _Progress(halt, told)
            try:
                with self._turn(key.node, halt):
                    return connection.deliver(key, delivery, identity, progress)
            except TransportError as error:
                if progress.done > furthest or not connection.is_up:
                    tries, since = 0, time.monotonic()
                else:
                    tries += 1
                furthest = max(furthest, progress.done)
                # An sshd that is being restarted accepts no connection while the agent's connection still stands.
                if tries >= _TRIES and time.monotonic() - since >= self._patience_s:
                    raise RelayRequired(f"{error.message} (tried {tries} times)") from error
            halt.wait(min(_PAUSE_S * max(1, tries), _LONGEST_PAUSE_S))

    @contextmanager
    def _turn(self, node: str, halt: threading.Event) -> Iterator[None]:
        with self._lock:
            turn = self._turns.setdefault(node, threading.Lock())
        while not turn.acquire(timeout=_PAUSE_S):
            if halt.is_set():
                raise TransferCanceled
        try:
            if halt.is_set():
                raise TransferCanceled
            yield
        finally:
            turn.release()


class _Progress:
    """Passes on how far it is, as long as somebody waits for it."""

    def __init__(self, halt: threading.Event, told: Progress) -> None:
        self._halt = halt
        self._told = told
        self.done = 0

    def __call__(self, done: int, total: int) -> None:
        if self._halt.is_set():
            raise TransferCanceled
        self.done = done
        self._told(done, total)
