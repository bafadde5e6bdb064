"""Uploads of outputs by nodes: repeated until done, or until the node is known to be unable to."""

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
"""Limit of consecutive connections that brought nothing while the node itself was connected."""
_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 5.0


class Deliverer:
    """Lets nodes upload outputs, one at a time for each node."""

    def __init__(self, patience_s: float) -> None:
        """Create the deliverer. ``patience_s``: how long connections may fail while the node's agent is connected."""
        self._patience_s = patience_s
        self._lock = threading.Lock()
        self._turns: dict[str, threading.Lock] = {}

    def deliver(
        self, connection: Connection, key: AttemptKey, delivery: Delivery, identity: Identity, halt: threading.Event,
        forward: Progress,
    ) -> Delivered:  # fmt: skip
        """Return when the whole output is uploaded. Waits for an unreachable node.

        Raises the errors of ``deliver_there``, and ``TransferCanceled``.
        """
        tries = furthest = 0
        since = time.monotonic()
        while True:
            progress = _Progress(halt, forward)
            try:
                with self._turn(key.node, halt):
                    return connection.deliver(key, delivery, identity, progress)
            except TransportError as error:
                if progress.done > furthest or not connection.is_up:
                    tries, since = 0, time.monotonic()
                else:
                    tries += 1
                furthest = max(furthest, progress.done)
                # A restarting sshd accepts no connection while the agent's connection is still open.
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
    """Forwards the progress, and aborts the transfer when ``halt`` is set."""

    def __init__(self, halt: threading.Event, forward: Progress) -> None:
        self._halt = halt
        self._forward = forward
        self.done = 0

    def __call__(self, done: int, total: int) -> None:
        if self._halt.is_set():
            raise TransferCanceled
        self.done = done
        self._forward(done, total)
