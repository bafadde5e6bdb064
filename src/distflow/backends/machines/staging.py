"""Bringing blobs to a node: one stream over a connection of its own, packed where that pays, taken up where it broke off.

The node's end is ``runtime.receiver``; the format is on the page of the agent protocol.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from distflow.backends.machines.bootstrap import Opened, open_service
from distflow.backends.machines.stream import ServiceStream
from distflow.errors import NodeUnreachable
from distflow.runtime.frames import frames
from distflow.transports.base import Transport

__all__ = ["Blob", "send_blobs"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Blob:
    """A file of this machine that nodes know by its content."""

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
    """Send blobs one after the other; ``progress`` is told how many bytes of all of them are there.

    ``timeout_s`` bounds how long the node may take to answer at first. Raises ``AgentError`` when the node refuses one (no
    space, damaged), ``NodeUnreachable`` and ``BootstrapFailed`` as connections do, ``OSError`` when a blob cannot be read here.
    """
    opened = open_service(transport, root, python, "receiver", timeout_s=timeout_s)
    try:
        stream = ServiceStream(transport.name, opened, "the connection that sent files ended")
        before = 0
        for blob in blobs:
            _send(opened, stream, blob, lambda at, before=before: progress(before + at))  # type: ignore[misc]
            before += blob.size
    finally:
        opened.channel.close()


def _send(opened: Opened, stream: ServiceStream, blob: Blob, progress: Callable[[int], None]) -> None:
    header = json.dumps({"hash": blob.digest, "size": blob.size}).encode()
    _write(opened, stream, header + b"\n")
    at = int(stream.line()["at"])
    progress(at)
    with blob.path.open("rb") as source:
        if at:
            source.seek(at)
        for size, frame in frames(source):
            _write(opened, stream, frame)
            at += size
            progress(at)
    stream.line()


def _write(opened: Opened, stream: ServiceStream, data: bytes) -> None:
    """Write; a receiver that ended before has said why."""
    try:
        opened.channel.write(data)
    except NodeUnreachable:
        stream.line()
        raise
