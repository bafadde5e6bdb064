"""The submitter's side of a command that runs next to a task: frames to and from the service on the node."""

from __future__ import annotations

import contextlib
import json
import queue
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from msgspec import Struct

from distflow.backends.machines.backend import transport_of
from distflow.backends.machines.connection.bootstrap import Opened, open_service
from distflow.backends.machines.connection.stream import ServiceStream
from distflow.errors import AgentError, NodeUnreachable
from distflow.pools.model import Node, Pool
from distflow.runtime.services.frames import FRAME, LARGEST_FRAME
from distflow.runtime.services.session import (
    END_OF_INPUT,
    ERRORS,
    EXIT,
    INPUT,
    OUTPUT,
    PING,
    REFUSED,
    REQUEST,
    RESIZE,
)
from distflow.runtime.untrusted import decode_object
from distflow.shell import Secret, revealed
from distflow.transports.base import Transport

__all__ = ["Exit", "Session", "Size", "open_session"]

_PIECE = 65536


class Size(Struct, frozen=True, kw_only=True):
    """The size of a terminal."""

    rows: int
    columns: int


class Exit(Struct, frozen=True, kw_only=True):
    """The end of the command."""

    code: int
    """The exit code as a shell reports it."""
    why: str = ""
    """Why it was killed, if it did not end by itself."""


class Session:
    """A command that runs on a node.

    1. ``events`` yields pairs: ``(False, data)`` for standard output, ``(True, data)`` for standard error, and finally an
       ``Exit``. It raises ``NodeUnreachable`` if the connection ends first, or if a message is malformed.
    2. ``write``, ``end_input`` and ``resize`` may be called from other threads; ``resize`` also from a signal handler. They
       never raise: ``events`` reports that the command is gone.
    3. ``close`` ends the command if it still runs.
    """

    def __init__(self, transport: Transport, opened: Opened) -> None:
        """Use a started service."""
        self._transport = transport
        self._channel = opened.channel
        self._stream = ServiceStream(
            transport.name, opened, "the connection ended, so the command was killed", FRAME.pack(0, PING)
        )
        self._sizes: queue.SimpleQueue[Size | None] = queue.SimpleQueue()
        threading.Thread(target=self._send_sizes, name=f"session on {transport.name}", daemon=True).start()

    def events(self) -> Iterator[tuple[bool, bytes] | Exit]:
        """Yield the command's output, then its ``Exit``."""
        while True:
            kind, data = self.next_frame()
            if kind in (OUTPUT, ERRORS):
                yield kind == ERRORS, data
            elif kind == EXIT:
                report = self._decoded(data)
                try:
                    code = int(report["code"])
                except (KeyError, TypeError, ValueError):
                    raise self._malformed("the report of the command's end has no valid exit code") from None
                yield Exit(code=code, why=str(report.get("why") or ""))
                return

    def next_frame(self) -> tuple[int, bytes]:
        """Wait for a frame, and return its kind and its data. Raises ``NodeUnreachable``."""
        head = self._stream.read(FRAME.size)
        if len(head) < FRAME.size:
            raise self._stream.broken_error()
        size, kind = FRAME.unpack(head)
        if size > LARGEST_FRAME:
            raise self._malformed(f"a frame of {size} bytes, but the limit is {LARGEST_FRAME} bytes")
        data = self._stream.read(size)
        if len(data) < size:
            raise self._stream.broken_error()
        return kind, data

    def write(self, data: bytes) -> None:
        """Send input to the command."""
        for at in range(0, len(data), _PIECE):
            self._send(INPUT, data[at : at + _PIECE])

    def end_input(self) -> None:
        """Close the command's standard input."""
        self._send(END_OF_INPUT, b"")

    def resize(self, size: Size) -> None:
        """Send the terminal's new size to the node."""
        self._sizes.put(size)

    def close(self) -> None:
        """Close the connection, which ends the command."""
        self._sizes.put(None)
        self._stream.close()
        self._transport.close()

    def request(self, message: Mapping[str, Any]) -> None:
        """Request a command, and wait until it has started. Raises ``AgentError`` and ``NodeUnreachable``."""
        self._send(REQUEST, json.dumps(message).encode())
        kind, data = self.next_frame()
        if kind == REFUSED:
            error = self._decoded(data)
            raise AgentError(self._transport.name, str(error.get("kind")), str(error.get("message")))

    def _decoded(self, data: bytes) -> dict[str, Any]:
        try:
            found: dict[str, Any] = decode_object(data)
        except ValueError as error:
            raise self._malformed(str(error)) from None
        return found

    def _malformed(self, why: str) -> NodeUnreachable:
        return NodeUnreachable(self._transport.name, f"the session sent a malformed message: {why}")

    def _send(self, kind: int, data: bytes) -> None:
        with contextlib.suppress(NodeUnreachable):
            self._channel.write(FRAME.pack(len(data), kind) + data)

    def _send_sizes(self) -> None:
        while (size := self._sizes.get()) is not None:
            self._send(RESIZE, json.dumps({"rows": size.rows, "columns": size.columns}).encode())


def open_session(
    pool: Pool,
    node: Node,
    attempt: str,
    argv: Sequence[str],
    *,
    secrets: Mapping[str, Secret],
    terminal: tuple[Size, str] | None,
    timeout_s: float,
    is_plain: bool = False,
) -> Session:
    """Start a command next to an attempt.

    ``secrets`` are variables of the command. ``terminal`` is a terminal's size and its kind (``TERM``); ``None``: no terminal.
    ``timeout_s`` limits the wait for the node's first answer.

    ``is_plain``: run it on the node itself, not in the task's container, and without ``setup``, which may print text.

    Raises ``NodeUnreachable`` and ``BootstrapFailed``, and ``AgentError`` if the attempt does not run or the node refuses.
    """
    transport = transport_of(pool, node)
    try:
        session = Session(transport, open_service(transport, node.root, node.python, "services.session", timeout_s=timeout_s))
    except BaseException:
        transport.close()
        raise
    shape = None
    if terminal is not None:
        size, kind = terminal
        shape = {"rows": size.rows, "columns": size.columns, "term": kind}
    try:
        session.request(
            {
                "attempt": attempt,
                "argv": list(argv),
                # In this message, secrets appear neither in a command line nor on a disk of the node.
                "secret_env": revealed(secrets),
                "terminal": shape,
                "plain": is_plain,
            }
        )
    except BaseException:
        session.close()
        raise
    return session
