"""Copying blobs to a node on a separate connection, compressed if that pays. An interrupted transfer is resumed.

The node's end is ``runtime.services.receiver``; docs/agent-protocol.md has the format.
"""

from __future__ import annotations

import errno
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from distflow.backends.machines.connection.bootstrap import open_service
from distflow.backends.machines.connection.stream import EMPTY_FRAME, EMPTY_LINE, ServiceStream
from distflow.errors import NodeUnreachable
from distflow.runtime.files.frames import frames
from distflow.transports.base import Transport

__all__ = ["Blob", "send_blobs"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Blob:
    """A file of this machine that nodes identify by its content."""

    digest: str
    """SHA-256, hexadecimal."""
    path: Path
    size: int
    """Bytes."""


def send_blobs(
    transport: Transport,
    root: str,
    python: str,
    blobs: Sequence[Blob],
    *,
    timeout_s: float,
    progress: Callable[[int], None] = lambda _: None,
) -> None:
    """Send blobs one after the other. ``progress`` gets the number of bytes of all of them that are there.

    ``timeout_s`` limits the wait for the node's first answer. Raises ``AgentError`` if the node refuses one (no space,
    damaged), ``NodeUnreachable`` and ``BootstrapFailed`` for connections, and ``OSError`` if a blob cannot be read here.
    """
    opened = open_service(transport, root, python, "services.receiver", timeout_s=timeout_s)
    stream = ServiceStream(transport.name, opened, "the connection that sent files ended")
    try:
        before = 0
        for blob in blobs:
            _send(stream, blob, lambda at, before=before: progress(before + at))  # type: ignore[misc]
            before += blob.size
    finally:
        stream.close()


def _send(stream: ServiceStream, blob: Blob, progress: Callable[[int], None]) -> None:
    header = json.dumps({"hash": blob.digest, "size": blob.size}).encode()
    # No keepalives until the answer is here: the node does not read before it has answered, and its next read is unknown.
    _write(stream, header + b"\n", b"")
    at = int(stream.line()["at"])
    progress(at)
    with blob.path.open("rb") as source:
        if at:
            source.seek(at)
        stream.write(b"", EMPTY_FRAME if at < blob.size else EMPTY_LINE)
        for size, frame in frames(source):
            at += size
            _write(stream, frame, EMPTY_FRAME if at < blob.size else EMPTY_LINE)
            progress(at)
    if at < blob.size:
        raise OSError(errno.EIO, "it became shorter while it was sent", str(blob.path))
    stream.line()


def _write(stream: ServiceStream, data: bytes, sign: bytes) -> None:
    """Write. If the receiver has ended, raise the error that it sent."""
    try:
        stream.write(data, sign)
    except NodeUnreachable:
        stream.line()
        raise
