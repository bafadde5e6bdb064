"""Fetching what a task wrote from its node: packed there, and taken as one stream over a connection of its own.

The node's end is ``runtime.sender``; the format is on the page of the agent protocol. What broke off is taken up there.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distflow.backends.machines.bootstrap import Opened, open_service
from distflow.errors import AgentError, NodeUnreachable
from distflow.runtime.frames import receive
from distflow.runtime.wire import MAX_LINE, OpError, encode
from distflow.transports.base import Transport

__all__ = ["Fetched", "fetch_output"]

_SHA_256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetched:
    """What a task wrote, as a blob of this machine."""

    digest: str
    """SHA-256, hexadecimal."""
    size: int
    """Bytes of the archive."""
    files: int
    """Files, directories and links in it."""
    left_out: tuple[str, ...]
    """Names of what is neither (sockets, pipes, devices)."""


def fetch_output(
    transport: Transport,
    root: str,
    python: str,
    attempt: str,
    blobs: Path,
    *,
    timeout_s: float,
    progress: Callable[[bool, int, int], None] = lambda *_: None,
) -> Fetched:
    """Bring an attempt's output to the blob store ``blobs``; ``progress`` hears whether it is packed, and bytes of how many.

    ``timeout_s`` bounds how long the node may take to answer at first. Raises ``AgentError`` when the node refuses (a file that
    cannot be read, no space, damaged), ``NodeUnreachable`` and ``BootstrapFailed`` as connections do, ``OSError`` when it
    cannot be kept here.
    """
    opened = open_service(transport, root, python, "sender", timeout_s=timeout_s)
    stream = _Stream(transport.name, opened)
    try:
        opened.channel.write(encode({"attempt": attempt}))
        while "packing" in (told := stream.line()):
            progress(False, int(told["packing"]), int(told["of"]))
        digest, size = str(told["hash"]), int(told["size"])
        if not _SHA_256.fullmatch(digest):
            raise AgentError(transport.name, "bad_request", f"it named its output {digest!r}")
        path = str(blobs / digest)
        said = lambda message: opened.channel.write(encode(message))  # noqa: E731
        if not receive(stream, path, digest, size, said, lambda at: progress(True, at, size)):
            raise stream.broke_off()
        return Fetched(digest=digest, size=size, files=int(told["files"]), left_out=tuple(told["left_out"]))
    except OpError as error:
        raise AgentError(transport.name, error.kind, error.message) from error
    finally:
        opened.channel.close()


class _Stream:
    """What the sender says: first lines, then frames."""

    def __init__(self, node: str, opened: Opened) -> None:
        self._node = node
        self._channel = opened.channel
        self._held = bytearray(opened.received)

    def line(self) -> dict[str, Any]:
        """Wait for the next line. Raises ``AgentError`` when it is a refusal, ``NodeUnreachable`` when there is none."""
        while b"\n" not in self._held:
            data = self._channel.read()
            if not data or len(self._held) > MAX_LINE:
                raise self.broke_off()
            self._held += data
        line, _, rest = self._held.partition(b"\n")
        self._held = rest
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise AgentError(self._node, answer["error"]["kind"], answer["error"]["message"])
        return answer

    def read(self, size: int) -> bytes:
        """Return ``size`` bytes; fewer only at the end."""
        while len(self._held) < size:
            data = self._channel.read()
            if not data:
                break
            self._held += data
        taken = bytes(self._held[:size])
        del self._held[:size]
        return taken

    def broke_off(self) -> NodeUnreachable:
        """Return the error that says so."""
        return NodeUnreachable(self._node, "the connection that fetched files ended", hint=self._channel.stderr_tail().strip())
