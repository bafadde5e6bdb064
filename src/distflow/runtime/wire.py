"""JSON lines in both directions: a reader of byte streams, and a queue in which urgent lines overtake bulk data."""

from __future__ import annotations

import json
import os
from collections import deque

from distflow.protocol.light_typing import TYPE_CHECKING, Any, Deque, Dict, List, Optional, cast
from distflow.runtime.untrusted import decode_object

if TYPE_CHECKING:
    from distflow.protocol.names import ErrorKind

__all__ = ["MAX_LINE", "Json", "LineReader", "OpError", "OutQueue", "encode"]

Json = Dict[str, Any]

MAX_LINE = 64 * 1024 * 1024
"""Maximum size of a message in bytes. It is large because a ``prepare`` request contains the contents of files."""


class OpError(Exception):
    """A refused or failed operation. ``kind`` is for programs (see ``ErrorKind``), and the message is for people."""

    def __init__(self, kind: ErrorKind, message: str) -> None:
        super().__init__(message)
        self.kind = kind
        self.message = message

    def as_json(self) -> Json:
        """Return the ``error`` field of a reply."""
        return {"kind": self.kind, "message": self.message}

    @classmethod
    def from_json(cls, error: Any) -> OpError:
        """Return the error in the ``error`` field of another process's reply, which may be malformed."""
        fields = error if isinstance(error, dict) else {}
        return cls(cast("ErrorKind", str(fields.get("kind"))), str(fields.get("message")))

    @classmethod
    def from_os(cls, error: OSError, doing: str) -> OpError:
        """Convert an error of the operating system. ``doing`` describes the failed operation."""
        import errno

        full: ErrorKind = "no_space"
        refused: ErrorKind = "permission"
        kinds = {errno.ENOSPC: full, errno.EDQUOT: full, errno.EACCES: refused, errno.EPERM: refused, errno.EROFS: refused}
        kind = kinds.get(error.errno or 0, "internal")
        where = " ({})".format(error.filename) if error.filename else ""
        return cls(kind, "{}: {}{}".format(doing, error.strerror or error, where))


def encode(message: Json) -> bytes:
    """Encode one message as a line."""
    return json.dumps(message, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "backslashreplace") + b"\n"


class LineReader:
    """Splits a stream of bytes into messages.

    A line that ``untrusted.decode_object`` rejects, or that is longer than the limit, raises ``ValueError``. The reader cannot
    be used after that.
    """

    def __init__(self, limit: int = MAX_LINE) -> None:
        self._buffer = bytearray()
        self._searched = 0
        self._limit = limit

    def feed(self, data: bytes) -> List[Json]:
        """Add ``data``. Returns the messages that it completed."""
        self._buffer += data
        messages: List[Json] = []
        start = 0
        while True:
            end = self._buffer.find(b"\n", max(start, self._searched))
            if end < 0:
                break
            line = bytes(self._buffer[start:end])
            start = end + 1
            if line.strip():
                messages.append(decode_object(line, max_bytes=self._limit))
        del self._buffer[:start]
        self._searched = len(self._buffer)
        if self._searched > self._limit:
            raise ValueError("a message is longer than {} bytes".format(self._limit))
        return messages


class OutQueue:
    """A queue of lines for a non-blocking descriptor. Urgent lines overtake bulk lines, but never interrupt a begun line."""

    def __init__(self) -> None:
        self._urgent: Deque[bytes] = deque()
        self._bulk: Deque[bytes] = deque()
        self._current: Optional[memoryview] = None
        self.bulk_bytes = 0

    def __bool__(self) -> bool:
        return bool(self._current or self._urgent or self._bulk)

    def put(self, line: bytes, *, bulk: bool = False) -> None:
        """Queue one line."""
        if bulk:
            self._bulk.append(line)
            self.bulk_bytes += len(line)
        else:
            self._urgent.append(line)

    def write_to(self, fd: int) -> None:
        """Write as much as ``fd`` accepts now. Raises ``OSError``, for example if the other side is gone."""
        while self:
            if not self._current:
                if self._urgent:
                    self._current = memoryview(self._urgent.popleft())
                else:
                    line = self._bulk.popleft()
                    self.bulk_bytes -= len(line)
                    self._current = memoryview(line)
            try:
                written = os.write(fd, self._current[:65536])
            except BlockingIOError:
                return
            self._current = self._current[written:] if written < len(self._current) else None
