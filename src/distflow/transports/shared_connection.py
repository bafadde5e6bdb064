"""One connection that many threads use, and that is replaced after it broke."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Generic, Protocol, TypeVar

from distflow.documents.quantities import seconds_text
from distflow.errors import NodeUnreachable, TransportError
from distflow.transports.base import Deadline

__all__ = ["Connection", "SharedConnection"]


class Connection(Protocol):
    """A connection that is never reopened: after a failure, another one replaces it."""

    def connect(self) -> None:
        """Connect, or raise a ``TransportError``."""

    @property
    def is_active(self) -> bool:
        """Whether the connection is open, as far as this side knows."""

    def close(self) -> None:
        """Close the connection. May be called at any time, from any thread, also during ``connect``."""


C = TypeVar("C", bound=Connection)


class SharedConnection(Generic[C]):
    """The current connection to a node, shared by threads.

    1. The first ``get`` connects. After the connection breaks, the next ``get`` connects again.
    2. Threads that need the connection at the same time share one connection attempt and its outcome.
    3. After ``close``, every new ``get`` raises ``NodeUnreachable``. A ``get`` that waits for an attempt raises that or the
       error of the attempt.
    """

    def __init__(self, node: str, make: Callable[[], C]) -> None:
        """Create the object without connecting. ``make`` returns an unopened connection to ``node``."""
        self._node = node
        self._make = make
        self._lock = threading.Lock()
        self._connection: C | None = None
        self._attempt: tuple[C, Future[C]] | None = None
        self._is_closed = False

    @property
    def current(self) -> C | None:
        """The last opened connection, which may be broken.

        ``None`` before the first one, after ``drop``, ``close`` or a failed attempt, and while connecting.
        """
        return self._connection

    def get(self, deadline: Deadline | None) -> C:
        """Return an active connection, connecting if needed. ``deadline`` limits the wait, not the connection attempt."""
        with self._lock:
            if self._is_closed:
                raise NodeUnreachable(self._node, "the transport is closed")
            if self._connection is not None and self._connection.is_active:
                return self._connection
            if self._attempt is None:
                if self._connection is not None:
                    self._connection.close()
                connection = self._make()
                self._connection = None
                self._attempt = (connection, Future())
                threading.Thread(
                    target=self._connect, args=self._attempt, name=f"connecting to {self._node}", daemon=True
                ).start()
            _, outcome = self._attempt
        try:
            return outcome.result(None if deadline is None else deadline.left())
        except FutureTimeout:
            seconds = 0.0 if deadline is None else deadline.seconds
            raise NodeUnreachable(self._node, f"no connection within {seconds_text(seconds)}") from None

    def drop(self) -> None:
        """Close the connection and end an attempt to connect, which then fails. The next ``get`` connects again."""
        self._drop(is_closed=False)

    def close(self) -> None:
        """Close the connection for good."""
        self._drop(is_closed=True)

    def _drop(self, *, is_closed: bool) -> None:
        with self._lock:
            self._is_closed = self._is_closed or is_closed
            links = [self._connection, self._attempt[0] if self._attempt is not None else None]
            self._connection = self._attempt = None
        for connection in links:
            if connection is not None:
                connection.close()

    def _connect(self, connection: C, outcome: Future[C]) -> None:
        error: BaseException | None = None
        try:
            connection.connect()
        except BaseException as failure:  # noqa: BLE001  raised again in the waiting threads
            error = failure
        with self._lock:
            if self._attempt is not None and self._attempt[0] is connection:
                self._attempt = None
            elif error is None:
                error = NodeUnreachable(self._node, "the connection was closed while it was made")
            if error is None:
                self._connection = connection
        if error is None:
            outcome.set_result(connection)
            return
        with contextlib.suppress(TransportError):
            connection.close()
        outcome.set_exception(error)
