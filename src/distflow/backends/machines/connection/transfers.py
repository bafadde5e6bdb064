"""Transfers from and to a node, and builds of Python environments there, each on its own channel of the transport.

If a transfer is interrupted, the next call resumes it. ``send_blobs``, ``fetch_output`` and ``build_venv_on_node`` use services
of ``runtime.services``. ``deliver_from_node`` and ``fetch_on_node`` use ``storage.node_service``, whose channel carries only
control messages. docs/agent-protocol.md describes the formats.
"""

from __future__ import annotations

import errno
import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from msgspec import Struct

from distflow.backends.machines.connection.bootstrap import STORAGE, open_service
from distflow.backends.machines.connection.stream import EMPTY_FRAME, EMPTY_LINE, ServiceStream
from distflow.documents.quantities import bytes_text
from distflow.documents.text import plain
from distflow.errors import AgentError, NodeUnreachable, StateError, StorageError
from distflow.runtime.files.safe_files import reserve_bytes
from distflow.runtime.services.frames import frames, receive
from distflow.runtime.wire import OpError, encode
from distflow.shell import mask
from distflow.storage.base import Progress
from distflow.storage.credentials import Identity
from distflow.storage.task_data import Delivered, Delivery, InputRequest, RelayRequired
from distflow.structs import replace
from distflow.transports.base import Transport

__all__ = [
    "Blob",
    "Fetched",
    "TransferRate",
    "build_venv_on_node",
    "deliver_from_node",
    "fetch_on_node",
    "fetch_output",
    "send_blobs",
]


class Blob(Struct, frozen=True, kw_only=True):
    """A file of this machine that nodes identify by its content."""

    digest: str
    """SHA-256, hexadecimal."""
    path: Path
    size: int
    """Bytes."""
    name: str
    """The path in the spec, or a description, for messages."""


def send_blobs(
    transport: Transport,
    root: str,
    python: str,
    blobs: Sequence[Blob],
    *,
    timeout_s: float,
    progress: Callable[[int], None] = lambda _: None,
) -> None:
    """Send blobs one after the other. ``progress`` gets the number of their bytes that are on the node.

    ``timeout_s`` limits the wait for the node's first answer. Raises ``AgentError`` if the node refuses a blob (no space,
    damaged), ``NodeUnreachable`` and ``BootstrapFailed`` for connections, ``OSError`` if a blob cannot be read here, and
    ``StateError`` if it is shorter than its ``size``.
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
    # No keepalives until the answer arrives: it decides whether the node reads frames or a line next.
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
        what = f"the copy of `{blob.name}` in the state directory became shorter after it was stored"
        raise StateError(what, hint="submit the workflow again")
    stream.line()


def _write(stream: ServiceStream, data: bytes, keepalive: bytes) -> None:
    """Write data. If the receiver has ended, raise the error that it sent."""
    try:
        stream.write(data, keepalive)
    except NodeUnreachable:
        stream.line()
        raise


_SHA_256 = re.compile(r"[0-9a-f]{64}")


class Fetched(Struct, frozen=True, kw_only=True):
    """A task's files as a blob of this machine, or of its node (``is_here``)."""

    digest: str
    """SHA-256, hexadecimal; empty for a checkpoint without files."""
    size: int
    """Bytes of the archive."""
    files: int
    """Number of files, directories and links in the archive."""
    left_out: tuple[str, ...]
    """As in ``backends.base.Collected``."""
    is_here: bool = True
    """False if it stayed on its node."""


def fetch_output(
    transport: Transport,
    root: str,
    python: str,
    attempt: str,
    blobs: Path,
    *,
    place: str | None = None,
    timeout_s: float,
    progress: Callable[[bool, int, int], None] = lambda *_: None,
    stays: Callable[[str, int], bool] | None = None,
) -> Fetched:
    """Copy an attempt's output to the blob store ``blobs``.

    ``progress(is_packed, done, total)`` is called with bytes. ``is_packed`` is false while the node packs the output, and true
    while the packed output is copied. With ``place``, copy that directory of the attempt, which may still run; if it has no
    files, ``digest`` is empty. After packing, ``stays(digest, size)`` returns whether the archive may stay on the node.
    ``timeout_s`` limits the wait for the node's first answer.

    Raises ``AgentError`` if the node refuses (an unreadable file, no space, damaged), ``NodeUnreachable`` and
    ``BootstrapFailed`` for connections, and ``OSError`` if the archive cannot be stored here.
    """
    opened = open_service(transport, root, python, "services.sender", timeout_s=timeout_s)
    stream = ServiceStream(transport.name, opened, "the connection that fetched files ended")
    try:
        stream.write(encode({"attempt": attempt} | ({} if place is None else {"place": place})))
        while "packing" in (reply := stream.line()):
            progress(False, int(reply["packing"]), int(reply["of"]))
        digest, size = str(reply["hash"]), int(reply["size"])
        if place is not None and not digest:
            return Fetched(digest="", size=0, files=0, left_out=())
        if not _SHA_256.fullmatch(digest):
            what = f"it sent an invalid checksum of the packed files: `{plain(digest[:80])}`"
            raise AgentError(transport.name, "bad_request", what)
        found = Fetched(digest=digest, size=size, files=int(reply["files"]), left_out=tuple(reply["left_out"]))
        if stays is not None and stays(digest, size):
            return replace(found, is_here=False)
        path = str(blobs / digest)
        send = lambda message: stream.write(encode(message))  # noqa: E731

        def on_received(at: int) -> None:
            _check_room(blobs, size - at)
            progress(True, at, size)

        if not receive(stream, path, digest, size, send, on_received):
            raise stream.broken_error()
        if place is not None:
            stream.write(encode({"got": True}))
        return found
    except OpError as error:
        raise AgentError(transport.name, error.kind, error.message) from error
    finally:
        stream.close()


def _check_room(blobs: Path, coming: int) -> None:
    """Raise ``OSError`` if ``coming`` more bytes would use the reserve of the disk, which the supervisor needs."""
    if coming <= 0:
        return
    missing, reserve = reserve_bytes(str(blobs), coming)
    if missing:
        text = f"no room for {bytes_text(coming)}; {bytes_text(reserve)} must stay free on this disk"
        raise OSError(errno.ENOSPC, text, str(blobs))


_PAUSES_S = (1.0, 5.0)
"""Seconds between a node's tries to reach a store. The tries are few, because the submitter can relay the data."""


def deliver_from_node(
    transport: Transport, root: str, python: str, attempt: str, delivery: Delivery, identity: Identity, *,
    environment: Mapping[str, str], timeout_s: float, progress: Progress,
) -> Delivered:  # fmt: skip
    """Let a node upload a task's output. ``progress`` is called every second, and may abort the upload by raising.

    ``environment`` is the environment of the node's tasks. ``timeout_s`` limits the wait for the node's first answer. Raises
    ``RelayRequired`` if the node cannot upload it, ``StorageError`` if relaying would not help, and ``NodeUnreachable`` and
    ``BootstrapFailed`` for connections.
    """
    request = {"attempt": attempt, "delivery": asdict(delivery)}
    reply = _request_transfer(transport, root, python, request, identity, environment, timeout_s, progress)
    return Delivered(label=str(reply["label"]), files=int(reply["files"]), size=int(reply["size"]))


def fetch_on_node(
    transport: Transport, root: str, python: str, attempt: str, source: InputRequest, place: str, identity: Identity, *,
    environment: Mapping[str, str], timeout_s: float, progress: Progress,
) -> None:  # fmt: skip
    """Let a node fetch an input into ``place`` of an attempt's directory. Otherwise like ``deliver_from_node``.

    May be repeated: data that is already on the node is not fetched again.
    """
    request = {"attempt": attempt, "input": asdict(source), "place": place}
    _request_transfer(transport, root, python, request, identity, environment, timeout_s, progress)


def _request_transfer(
    transport: Transport, root: str, python: str, request: Mapping[str, Any], identity: Identity,
    environment: Mapping[str, str], timeout_s: float, progress: Progress,
) -> Mapping[str, Any]:  # fmt: skip
    opened = open_service(transport, root, python, "node_service", timeout_s=timeout_s, bundle=STORAGE)
    stream = ServiceStream(transport.name, opened, "the connection to the transfer service of a node ended")
    try:
        settings = {"identity": identity.to_wire(), "environment": dict(environment), "pauses_s": _PAUSES_S}
        stream.write(encode({**request, **settings}))
        while "done" in (reply := stream.line()):
            progress(int(reply["done"]), int(reply["total"]))
        if "relay" in reply:
            raise RelayRequired(f"{transport.name}: {mask(str(reply['relay']), identity.secrets)}")
        return reply
    except AgentError as error:
        raise StorageError(mask(error.detail, identity.secrets)) from None
    finally:
        stream.close()


def build_venv_on_node(
    transport: Transport, root: str, python: str, request: Mapping[str, Any], *, timeout_s: float,
    progress: Callable[[str, float], None], opened: Callable[[Callable[[], None]], None] = lambda _close: None,
) -> tuple[str, float]:  # fmt: skip
    """Build a Python environment on a node, unless it exists.

    Returns the tool that built it (empty if the environment existed already) and the duration in seconds.

    ``request`` is a request of ``runtime.services.venv_builder``. Every two seconds, ``progress`` gets the tool's last line, or
    why the build waits, and the seconds so far. It may cancel the build by raising. ``opened`` gets a function with which any
    thread can end the connection, and with it the build; ``opened`` may raise too. Raises ``AgentError`` with the tool's last
    lines if it fails, and ``NodeUnreachable`` and ``BootstrapFailed`` for connections.
    """
    service = open_service(transport, root, python, "services.venv_builder", timeout_s=timeout_s)
    stream = ServiceStream(transport.name, service, "the connection to the build of a Python environment ended")
    try:
        opened(stream.close)
        stream.write(encode(dict(request)))
        while "building" in (reply := stream.line()):
            progress(str(reply["building"])[:_LONGEST_PROGRESS], float(reply["seconds"]))
        return str(reply["built"])[:_LONGEST_PROGRESS], float(reply["seconds"])
    finally:
        stream.close()


_LONGEST_PROGRESS = 120
_REPORT_INTERVAL_S = 1.0


class TransferRate:
    """The rate of a transfer. Bytes that an earlier try has transferred do not count."""

    def __init__(self) -> None:
        """Start the clock."""
        self._began_at = self._reported_at = time.monotonic()
        self._first: int | None = None

    def begin(self, done: int) -> None:
        """Restart the count at ``done`` bytes."""
        self._began_at, self._first = time.monotonic(), done

    def due(self, done: int) -> float | None:
        """Return the bytes per second if a report is due, at most once a second; otherwise ``None``."""
        if self._first is None:
            self._first = done
        at = time.monotonic()
        if at - self._reported_at < _REPORT_INTERVAL_S:
            return None
        self._reported_at = at
        return (done - self._first) / max(at - self._began_at, 0.001)
