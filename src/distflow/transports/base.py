"""What a transport is: commands and bytes to one node and back. It knows nothing of agents or workflows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

__all__ = ["Channel", "Completed", "Stream", "Transport"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Completed:
    """A command that has ended."""

    exit_code: int
    """As a shell puts it: 127 when the program was not found, 126 when it may not be executed, 128 + N for signal N."""
    stdout: bytes
    """All of it."""
    stderr: bytes
    """All of it."""


class Channel(Protocol):
    """One running command with a pipe to it and a pipe back.

    Contract, held by tests/contract/test_transport.py for every implementation:

    1. ``write`` may be called from several threads; the bytes of one call stay together. It returns when all are on their
       way, and raises ``NodeUnreachable`` when the other side or the channel is closed.
    2. ``read`` blocks for up to 64 KiB and returns ``b""`` at the end. It never raises: an end is an end, ``stderr_tail``
       says more.
    3. ``close`` may be called twice, from any thread, and never raises. A ``read`` or ``write`` that another thread is blocked
       in ends at once. It closes the command's standard input and stops no remote process.
    4. Standard error is drained whether anybody asks for it or not; ``stderr_tail`` gives the last kilobytes. Once ``read`` has
       returned ``b""`` because the command ended, it is complete, and ``exit_code`` is known.
    """

    def write(self, data: bytes) -> None:
        """Send ``data`` to the command's standard input."""

    def read(self) -> bytes:
        """Wait for output; return what is there, up to 64 KiB."""

    def stderr_tail(self) -> str:
        """The end of what the command wrote to standard error."""

    @property
    def exit_code(self) -> int | None:
        """How the command ended, as ``Completed`` has it; ``None`` while it runs, and where nobody told."""

    def close(self) -> None:
        """Let go of the command."""


class Stream(Protocol):
    """One TCP connection on the node.

    Contract, held by tests/contract/test_transport.py for every implementation:

    1. ``read`` blocks for up to 64 KiB and returns ``b""`` at the end; it never raises.
    2. ``write`` returns when all is on its way, and raises ``NodeUnreachable`` when the other side takes no more.
    3. ``end`` says that no more will be written; the other direction stays open.
    4. ``close`` may be called twice, from any thread, and never raises. A ``read`` that another thread is blocked in ends.
    """

    def read(self) -> bytes:
        """Wait for data; return what is there, up to 64 KiB."""

    def write(self, data: bytes) -> None:
        """Send ``data``."""

    def end(self) -> None:
        """Write no more."""

    def close(self) -> None:
        """Hang up."""


class Transport(Protocol):
    """Runs commands on one node.

    Contract, held by tests/contract/test_transport.py for every implementation:

    1. ``run`` returns a ``Completed`` for every exit code, zero or not, also when the program does not exist.
    2. It raises only ``TransportError`` and its subclasses, each naming the node; ``NodeUnreachable`` after ``timeout_s``,
       when it has stopped of the command what it can reach.
    3. stdout and stderr are drained together, while ``input`` is written: megabytes on one never block the other.
    4. ``argv`` arrives as it is: no shell of ours or theirs changes a byte of it.
    5. ``open`` starts a command in a session of its own. Neither the end of our process nor ``close`` stops it.
    6. ``dial`` connects to a TCP port of the node itself, on its loopback. It raises ``NodeUnreachable`` when nothing listens.
    7. ``hang_up`` drops the connection, also one that is being made: what uses it ends with an error, and the next use connects
       again. It never raises, and does not stop remote processes.
    8. ``close`` may be called twice and never raises. It does not stop remote processes.
    """

    @property
    def name(self) -> str:
        """The node's name, for messages."""

    @property
    def reached_address(self) -> str | None:
        """The network address at which the node was reached; ``None`` where there is none to tell."""

    @property
    def named_addresses(self) -> tuple[str, ...]:
        """Where other hosts or programs stand between: what the node's host name means here; empty otherwise."""

    def run(self, argv: Sequence[str], *, input: bytes = b"", timeout_s: float) -> Completed:
        """Run a command to its end."""

    def open(self, argv: Sequence[str]) -> Channel:
        """Start a command and keep a channel to it."""

    def dial(self, port: int, *, timeout_s: float) -> Stream:
        """Connect to a TCP port of the node."""

    def hang_up(self) -> None:
        """Drop the connection, which may be dead without having ended; the next use makes a new one."""

    def close(self) -> None:
        """Give back what the transport holds."""
