"""Streams of an attempt's files to the other side, with credit: a slow reader of one log delays nothing else."""

from __future__ import annotations

import binascii
import os
from typing import Callable, Dict, List, Optional

from distflow.runtime.wire import Json, OpError

__all__ = ["CREDIT", "PIECE", "Tails"]

PIECE = 32 * 1024
CREDIT = 256 * 1024


class _Tail:
    def __init__(self, stream: int, attempt: str, path: str, offset: int) -> None:
        self.stream = stream
        self.attempt = attempt
        self.path = path
        self.offset = offset
        self.credit = CREDIT
        self.has_ended = False
        self.fd: Optional[int] = None

    def read(self) -> bytes:
        try:
            if self.fd is None:
                self.fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
            return os.pread(self.fd, min(PIECE, self.credit), self.offset)
        except OSError:
            self.close()  # a bad disk, or NFS whose server has restarted: that wants it opened anew
            return b""

    def close(self) -> None:
        if self.fd is not None:
            os.close(self.fd)
            self.fd = None


class Tails:
    """All streams of a connection. ``push(event)`` queues an event as bulk data; ``has_room()`` says whether it should."""

    def __init__(self, push: Callable[[Json], None], has_room: Callable[[], bool]) -> None:
        self._push = push
        self._has_room = has_room
        self._tails: Dict[int, _Tail] = {}

    def add(self, stream: int, attempt: str, path: str, offset: int, has_ended: bool) -> None:
        """Begin a stream; the same number again begins it anew."""
        if offset < 0:
            raise OpError("bad_request", "`offset` is a number of bytes")
        self.remove(stream)
        tail = _Tail(stream, attempt, path, offset)
        tail.has_ended = has_ended
        self._tails[stream] = tail
        self.pump()

    def remove(self, stream: int) -> None:
        """End a stream."""
        tail = self._tails.pop(stream, None)
        if tail is not None:
            tail.close()

    def credit(self, stream: int, size: int) -> None:
        """The other side has dealt with ``size`` bytes. A stream that has ended needs none."""
        tail = self._tails.get(stream)
        if tail is not None:
            tail.credit = min(CREDIT, tail.credit + max(0, size))
            self.pump()

    def grown(self, attempt: str, has_ended: bool) -> None:
        """There may be more to send of the attempt's files; when it has ended, they will not grow any more."""
        for tail in self._tails.values():
            if tail.attempt == attempt:
                tail.has_ended = tail.has_ended or has_ended
        self.pump(attempt)

    def pump(self, attempt: Optional[str] = None) -> None:
        """Send what is there, in turns, while there is room for it."""
        active: List[_Tail] = [tail for tail in self._tails.values() if attempt is None or tail.attempt == attempt]
        while active and self._has_room():
            for tail in list(active):
                if not self._has_room() or not self._push_piece(tail):
                    active.remove(tail)

    def _push_piece(self, tail: _Tail) -> bool:
        if not tail.credit:
            return False
        has_ended = tail.has_ended
        data = tail.read()
        if data:
            text = binascii.b2a_base64(data, newline=False).decode("ascii")
            self._push({"event": "data", "stream": tail.stream, "offset": tail.offset, "data": text})
            tail.offset += len(data)
            tail.credit -= len(data)
            return True
        if has_ended:
            size = os.fstat(tail.fd).st_size if tail.fd is not None else 0
            self._push({"event": "eof", "stream": tail.stream, "size": size})
            self.remove(tail.stream)
        return False
