"""Streams of an attempt's output to the other side, with credit: a slow reader of one log delays nothing else.

A stream walks through the files of the log, or of its index (``logfiles``): the head, then each segment that is still there.
"""

from __future__ import annotations

import binascii
import os
from typing import Callable, Dict, List, Optional

from distflow.runtime.files import log_files
from distflow.runtime.files.log_files import Segment
from distflow.runtime.wire import Json, OpError

__all__ = ["CREDIT", "PIECE", "Tails"]

PIECE = 32 * 1024
CREDIT = 256 * 1024


class _Tail:
    def __init__(self, stream: int, attempt: str, directory: str, segment: Segment, offset: int) -> None:
        self.stream = stream
        self.attempt = attempt
        self.directory = directory
        self.segment = segment
        self.offset = offset
        self.credit = CREDIT
        self.has_ended = False
        self.fd: Optional[int] = None

    def read(self) -> bytes:
        """Return the next piece; empty when there is none, or the disk does not give it now."""
        while True:
            data = self._read()
            if data or data is None:
                return data or b""
            following = log_files.next_of(self.directory, self.segment)
            if following is None:
                return b""
            # What came before the next file began may have been written since.
            data = self._read()
            if data or data is None:
                return data or b""
            self.close()
            self.segment, self.offset = following, 0

    def size(self) -> int:
        """How long the whole output is, or the index's file that was read last."""
        length = os.fstat(self.fd).st_size if self.fd is not None else 0
        return length + (self.segment.start if self.segment.kind == "log" else 0)

    def _read(self) -> Optional[bytes]:
        """Return what stands there; None when that cannot be known now."""
        try:
            if self.fd is None:
                path = os.path.join(self.directory, self.segment.name)
                self.fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
            return os.pread(self.fd, min(PIECE, self.credit), self.offset)
        except FileNotFoundError:
            return b""  # it is not kept any longer
        except OSError:
            self.close()  # a bad disk, or NFS whose server has restarted: that wants it opened anew
            return None

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

    def add(self, stream: int, attempt: str, directory: str, name: str, offset: int, has_ended: bool) -> None:
        """Begin a stream at an offset of the file ``name``; the same number again begins it anew."""
        segment = log_files.parse(name)
        if segment is None:
            raise OpError("bad_request", "`file` is a file of the output")
        if offset < 0:
            raise OpError("bad_request", "`offset` is a number of bytes")
        self.remove(stream)
        tail = _Tail(stream, attempt, directory, segment, offset)
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
            name = tail.segment.name
            self._push({"event": "data", "stream": tail.stream, "file": name, "offset": tail.offset, "data": text})
            tail.offset += len(data)
            tail.credit -= len(data)
            return True
        if has_ended:
            self._push({"event": "eof", "stream": tail.stream, "size": tail.size()})
            self.remove(tail.stream)
        return False
