"""Fetching a task's files from its node: they are packed there and sent on a separate connection.

The node's end is ``runtime.services.sender``; docs/agent-protocol.md has the format. An interrupted transfer is resumed.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from distflow.backends.machines.connection.bootstrap import open_service
from distflow.backends.machines.connection.stream import ServiceStream
from distflow.documents.quantities import bytes_text
from distflow.errors import AgentError
from distflow.runtime.files.durable import reserve_bytes
from distflow.runtime.files.frames import receive
from distflow.runtime.wire import OpError, encode
from distflow.transports.base import Transport

__all__ = ["Fetched", "fetch_output"]

_SHA_256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetched:
    """A task's files as a blob of this machine."""

    digest: str
    """SHA-256, hexadecimal."""
    size: int
    """Bytes of the archive."""
    files: int
    """Files, directories and links in it."""
    left_out: tuple[str, ...]
    """Names of other files (sockets, pipes, devices)."""
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

    ``progress`` gets whether it is packed, and the done and the total bytes. With ``place``, copy that directory of the
    attempt, which may still run; if it has no files, ``digest`` is empty. After packing, ``stays(digest, size)`` returns
    whether the archive may stay on the node. ``timeout_s`` limits the wait for the node's first answer.

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
            raise AgentError(transport.name, "bad_request", f"it named its output {digest!r}")
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
    """Refuse data that would fill this disk, because the supervisor needs the reserve. Raises ``OSError``."""
    if coming <= 0:
        return
    missing, reserve = reserve_bytes(str(blobs), coming)
    if missing:
        text = f"no room for {bytes_text(coming)} next to the {bytes_text(reserve)} that stay free there"
        raise OSError(errno.ENOSPC, text, str(blobs))
