"""A machine that is reached over SSH."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout

from distflow.errors import NodeUnreachable, TransportError
from distflow.transports.base import Completed, Deadline
from distflow.transports.ssh.channel import SshChannel, SshStream, remote_command, run_to_end
from distflow.transports.ssh.config import SshDestination
from distflow.transports.ssh.connection import SshConnection

__all__ = ["SshDestination", "SshTransport"]


class SshTransport:
    """Runs commands over one SSH connection (contract: ``transports.base.Transport``).

    1. The first ``run`` or ``open`` connects. After a broken connection, the next one connects again.
    2. Threads that need the connection at the same time share one connection attempt and its outcome.
    3. ``HostKeyUnknown``, ``HostKeyMismatch`` and ``AuthenticationRefused`` need a person; other errors may be temporary.
    4. After ``close`` every call raises ``NodeUnreachable``, and so does a connection attempt that was under way.
    """

    def __init__(self, name: str, destination: SshDestination) -> None:
        """``name`` is the node's name in messages."""
        self.name = name
        self.destination = destination
        self._lock = threading.Lock()
        self._connection: SshConnection | None = None
        self._attempt: tuple[SshConnection, Future[SshConnection]] | None = None
        self._is_closed = False

    def run(self, argv: Sequence[str], *, input: bytes = b"", timeout_s: float) -> Completed:
        """Run a command to its end; ``timeout_s`` includes the time to connect."""
        deadline = Deadline(timeout_s)
        return run_to_end(self._connected(deadline), argv, input, deadline)

    def open(self, argv: Sequence[str]) -> SshChannel:
        """Start a command and keep a channel to it."""
        connection = self._connected(None)
        return SshChannel(connection, connection.execute(remote_command(argv), Deadline(connection.connect_timeout_s)))

    def dial(self, port: int, *, timeout_s: float) -> SshStream:
        """Connect to a TCP port of the node, through the connection."""
        deadline = Deadline(timeout_s)
        connection = self._connected(deadline)
        return SshStream(connection, connection.dial(port, deadline))

    def hang_up(self) -> None:
        """Drop the connection; the next use makes a new one."""
        self._drop()

    def close(self) -> None:
        """Close the connection for good. Remote processes continue."""
        self._drop(is_closed=True)

    def _drop(self, *, is_closed: bool = False) -> None:
        with self._lock:
            self._is_closed = self._is_closed or is_closed
            links = [self._connection, self._attempt[0] if self._attempt is not None else None]
            self._connection = None
        for connection in links:
            if connection is not None:
                connection.close()

    @property
    def reached_address(self) -> str | None:
        """The address that SSH reached; ``None`` before the first connection, and behind jump hosts and proxies."""
        connection = self._connection
        return connection.address if connection is not None else None

    @property
    def named_addresses(self) -> tuple[str, ...]:
        """Behind jump hosts and proxies: the addresses of the host's name, if this machine can resolve it."""
        connection = self._connection
        return connection.named_addresses if connection is not None else ()

    def _connected(self, deadline: Deadline | None) -> SshConnection:
        """Return an active connection, connecting if needed. ``deadline`` limits the wait, not the connection attempt."""
        with self._lock:
            if self._is_closed:
                raise NodeUnreachable(self.name, "the transport is closed")
            if self._connection is not None and self._connection.is_active:
                return self._connection
            if self._attempt is None:
                if self._connection is not None:
                    self._connection.close()
                connection = SshConnection(self.name, self.destination)
                self._connection = None
                self._attempt = (connection, Future())
                threading.Thread(target=self._connect, args=self._attempt, name=f"ssh to {self.name}", daemon=True).start()
            _, outcome = self._attempt
        try:
            return outcome.result(None if deadline is None else deadline.left())
        except FutureTimeout:
            seconds = 0.0 if deadline is None else deadline.seconds
            raise NodeUnreachable(self.name, f"no connection within {seconds:g} s") from None

    def _connect(self, connection: SshConnection, outcome: Future[SshConnection]) -> None:
        error: BaseException | None = None
        try:
            connection.connect()
        except BaseException as failure:  # noqa: BLE001  raised again in the waiting threads
            error = failure
        with self._lock:
            self._attempt = None
            if error is None and self._is_closed:
                error = NodeUnreachable(self.name, "the transport was closed while it connected")
            if error is None:
                self._connection = connection
        if error is None:
            outcome.set_result(connection)
            return
        with contextlib.suppress(TransportError):
            connection.close()
        outcome.set_exception(error)
