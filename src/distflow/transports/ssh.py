"""A machine that is reached over SSH."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout

from distflow.errors import NodeUnreachable, TransportError
from distflow.transports.base import Completed
from distflow.transports.deadline import Deadline
from distflow.transports.sshchannel import SshChannel, SshStream, run_to_end
from distflow.transports.sshcommand import remote_command
from distflow.transports.sshconfig import SshDestination
from distflow.transports.sshlink import SshLink

__all__ = ["SshDestination", "SshTransport"]


class SshTransport:
    """Runs commands over one SSH connection (contract: ``transports.base.Transport``).

    1. Nothing is connected before the first ``run`` or ``open``; a connection that broke is made anew by the next one.
    2. Threads that need the connection at the same time share one attempt and its outcome.
    3. The errors ``HostKeyUnknown``, ``HostKeyMismatch`` and ``AuthenticationRefused`` need a person; the rest may pass.
    4. After ``close`` everything raises ``NodeUnreachable``, also what was being connected.
    """

    def __init__(self, name: str, destination: SshDestination) -> None:
        """Call the node ``name``."""
        self.name = name
        self.destination = destination
        self._lock = threading.Lock()
        self._link: SshLink | None = None
        self._attempt: tuple[SshLink, Future[SshLink]] | None = None
        self._is_closed = False

    def run(self, argv: Sequence[str], *, input: bytes = b"", timeout_s: float) -> Completed:
        """Run a command to its end; the time to connect counts."""
        deadline = Deadline(timeout_s)
        return run_to_end(self._connected(deadline), argv, input, deadline)

    def open(self, argv: Sequence[str]) -> SshChannel:
        """Start a command and keep a channel to it."""
        link = self._connected(None)
        return SshChannel(link, link.execute(remote_command(argv), Deadline(link.connect_timeout_s)))

    def dial(self, port: int, *, timeout_s: float) -> SshStream:
        """Connect to a TCP port of the node, through the connection."""
        deadline = Deadline(timeout_s)
        link = self._connected(deadline)
        return SshStream(link, link.dial(port, deadline))

    def hang_up(self) -> None:
        """Drop the connection; the next use makes a new one."""
        self._drop()

    def close(self) -> None:
        """Hang up for good; what runs there goes on."""
        self._drop(is_closed=True)

    def _drop(self, *, is_closed: bool = False) -> None:
        with self._lock:
            self._is_closed = self._is_closed or is_closed
            links = [self._link, self._attempt[0] if self._attempt is not None else None]
            self._link = None
        for link in links:
            if link is not None:
                link.close()

    @property
    def reached_address(self) -> str | None:
        """The address that SSH reached; ``None`` before, and behind jump hosts and proxies."""
        link = self._link
        return link.address if link is not None else None

    @property
    def named_addresses(self) -> tuple[str, ...]:
        """Behind jump hosts and proxies: the addresses of the host's name, where this machine knows it."""
        link = self._link
        return link.named_addresses if link is not None else ()

    def _connected(self, deadline: Deadline | None) -> SshLink:
        """Return a link that stands, making one when needed; ``deadline`` bounds only how long is waited here."""
        with self._lock:
            if self._is_closed:
                raise NodeUnreachable(self.name, "the transport is closed")
            if self._link is not None and self._link.is_active:
                return self._link
            if self._attempt is None:
                if self._link is not None:
                    self._link.close()
                link = SshLink(self.name, self.destination)
                self._link = None
                self._attempt = (link, Future())
                threading.Thread(target=self._connect, args=self._attempt, name=f"ssh to {self.name}", daemon=True).start()
            _, outcome = self._attempt
        try:
            return outcome.result(None if deadline is None else deadline.left())
        except FutureTimeout:
            seconds = 0.0 if deadline is None else deadline.seconds
            raise NodeUnreachable(self.name, f"not connected within {seconds:g} s") from None

    def _connect(self, link: SshLink, outcome: Future[SshLink]) -> None:
        error: BaseException | None = None
        try:
            link.connect()
        except BaseException as failure:  # noqa: BLE001  carried to the threads that wait for it
            error = failure
        with self._lock:
            self._attempt = None
            if error is None and self._is_closed:
                error = NodeUnreachable(self.name, "the transport was closed while it connected")
            if error is None:
                self._link = link
        if error is None:
            outcome.set_result(link)
            return
        with contextlib.suppress(TransportError):
            link.close()
        outcome.set_exception(error)
