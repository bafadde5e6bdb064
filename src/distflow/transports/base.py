"""The protocol of a transport, which runs commands on one node and transfers bytes; and ``fan_out`` over many nodes.

Transports do not depend on agents or workflows.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeVar

from msgspec import Struct

from distflow.errors import DistflowError, NodeUnreachable

__all__ = [
    "REASON_MARK",
    "BorrowedTransport",
    "Channel",
    "Completed",
    "Deadline",
    "Outcome",
    "Stream",
    "Transport",
    "command_closed",
    "fan_out",
    "is_cut_off",
    "tail_with_reason",
]

REASON_MARK = "[connection] "
"""Precedes the reason of a broken connection in ``Channel.stderr_tail``."""


class Deadline:
    """A time limit, ``seconds`` from now, for several steps together."""

    def __init__(self, seconds: float) -> None:
        """Start now."""
        self.seconds = seconds
        self._end = time.monotonic() + seconds

    def left(self) -> float:
        """Return the remaining seconds; 0 when it has passed."""
        return max(0.0, self._end - time.monotonic())

    @property
    def has_passed(self) -> bool:
        """Whether it has passed."""
        return self.left() <= 0


class Completed(Struct, frozen=True, kw_only=True):
    """A command that has ended."""

    exit_code: int
    """As in a shell: 127 if the program was not found, 126 if it cannot be executed, 128 + N after signal N."""
    stdout: bytes
    """All of standard output."""
    stderr: bytes
    """All of standard error."""


class Channel(Protocol):
    """The pipes to and from one running command.

    Contract, checked by tests/contract/test_transport.py for every implementation:

    1. ``write`` may be called from several threads; the bytes of one call stay together. It returns when all bytes have been
       sent or queued, and raises ``NodeUnreachable`` if the other side or the channel is closed.
    2. ``read`` blocks until there is data, returns up to 64 KiB, and returns ``b""`` at the end. It never raises;
       ``stderr_tail`` explains an early end.
    3. ``close`` may be called twice, from any thread, and never raises. It ends a ``read`` or ``write`` that blocks in another
       thread. It closes the command's standard input, and does not stop the command.
    4. Standard error is always drained; ``stderr_tail`` returns its last kilobytes. Once ``read`` has returned ``b""`` because
       the command ended, standard error is complete and ``exit_code`` is known, unless another process holds standard error.
    """

    def write(self, data: bytes) -> None:
        """Send ``data`` to the command's standard input."""

    def read(self) -> bytes:
        """Wait for output and return up to 64 KiB of it."""

    def stderr_tail(self) -> str:
        """The end of the command's standard error, and why the connection broke if it did."""

    @property
    def exit_code(self) -> int | None:
        """The command's exit code, as in ``Completed``; ``None`` while it runs, and if the connection broke first."""

    def close(self) -> None:
        """Close the pipes; the command continues."""


class Stream(Protocol):
    """One TCP connection on the node.

    Contract, checked by tests/contract/test_transport.py for every implementation:

    1. ``read`` blocks until there is data, returns up to 64 KiB, and returns ``b""`` at the end. It never raises.
    2. ``write`` returns when all bytes have been sent or queued, and raises ``NodeUnreachable`` if the other side has closed.
    3. ``end`` closes the sending direction; the other direction stays open.
    4. ``close`` may be called twice, from any thread, and never raises. It ends a ``read`` that blocks in another thread.
    """

    def read(self) -> bytes:
        """Wait for data and return up to 64 KiB of it."""

    def write(self, data: bytes) -> None:
        """Send ``data``."""

    def end(self) -> None:
        """Close the sending direction."""

    def close(self) -> None:
        """Close the connection."""


class Transport(Protocol):
    """Runs commands on one node.

    Contract, checked by tests/contract/test_transport.py for every implementation:

    1. ``run`` returns a ``Completed`` for every exit code, also when the program does not exist.
    2. If the transport fails, ``run`` raises ``TransportError`` or a subclass, which names the node. After ``timeout_s`` it
       stops the command as far as it can and raises ``NodeUnreachable``.
    3. ``run`` drains stdout and stderr while it writes ``input``, so megabytes in one of them never block the others.
    4. ``argv`` arrives unchanged: no shell on either side changes a byte of it.
    5. ``open`` starts a command in its own session. Neither the end of this process nor ``close`` stops it.
    6. ``dial`` connects to a TCP port on the node's loopback address. It raises ``NodeUnreachable`` if nothing listens.
    7. ``hang_up`` drops the connection, or the attempt to connect. Calls that use it end with an error, and the next call
       connects again. It never raises, and does not stop remote processes.
    8. ``close`` may be called twice and never raises. It does not stop remote processes.
    """

    @property
    def name(self) -> str:
        """The node's name, for messages."""

    @property
    def reached_address(self) -> str | None:
        """The network address at which the node was reached; ``None`` if unknown."""

    @property
    def named_addresses(self) -> tuple[str, ...]:
        """Behind jump hosts or proxies: the addresses of the node's host name, as this machine resolves it; otherwise empty."""

    def run(self, argv: Sequence[str], *, input: bytes = b"", timeout_s: float) -> Completed:
        """Run a command to its end."""

    def open(self, argv: Sequence[str]) -> Channel:
        """Start a command and keep a channel to it."""

    def dial(self, port: int, *, timeout_s: float) -> Stream:
        """Connect to a TCP port of the node."""

    def hang_up(self) -> None:
        """Drop the connection, which may be dead without an error; the next call connects again."""

    def close(self) -> None:
        """Close the connection for good."""


def tail_with_reason(tail: str, why: str) -> str:
    """Return ``tail``, and below it ``why`` the connection broke. An empty ``why`` adds nothing."""
    newline = "\n" if tail and not tail.endswith("\n") else ""
    return f"{tail}{newline}{REASON_MARK}{why}\n" if why else tail


def is_cut_off(channel: Channel) -> bool:
    """Return whether the connection broke before the command ended. ``channel.stderr_tail`` then ends with the reason."""
    return channel.exit_code is None and REASON_MARK in channel.stderr_tail()


def command_closed(node: str) -> NodeUnreachable:
    """Return the error of a write to a channel that this side has closed."""
    return NodeUnreachable(node, "the connection to the command is closed")


class BorrowedTransport:
    """A transport that another object owns; only the owner closes it or hangs up (contract: ``Transport``)."""

    reached_address: str | None = None
    named_addresses: tuple[str, ...] = ()

    def __init__(self, lender: Transport) -> None:
        """Use ``lender``."""
        self.name = lender.name
        self.run, self.open, self.dial = lender.run, lender.open, lender.dial

    def hang_up(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


T = TypeVar("T")


class Outcome(Struct, Generic[T], frozen=True, kw_only=True):
    """The result of the action on one node: a value or an error."""

    node: str
    value: T | None = None
    error: DistflowError | None = None

    @property
    def is_ok(self) -> bool:
        """Whether the action ended without an error."""
        return self.error is None


def fan_out(transports: Sequence[Transport], action: Callable[[Transport], T], *, limit: int = 64) -> tuple[Outcome[T], ...]:
    """Call ``action`` for every transport, at most ``limit`` at a time, and return the outcomes in the order of ``transports``.

    A ``DistflowError`` becomes an outcome. Any other exception is a bug, and is raised after all actions have ended. A keyboard
    interrupt does not wait for the actions.
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
