"""Streams of attempts' output to the supervisor, with flow control: a slow reader of one log delays no other stream.

A stream sends an attempt's log, the index of that log, or the resource samples. A log and its index consist of several files
(see ``log_files``): the stream sends the first file (the head), and then each later segment that still exists. The
samples are one file.
"""

from __future__ import annotations

import binascii
import os
import time

from distflow.protocol.light_typing import Callable, Dict, List, Optional
from distflow.runtime.files import log_files
from distflow.runtime.files.log_files import LogSegment
from distflow.runtime.wire import Json, OpError

__all__ = ["LogStreams"]

_PIECE = 32 * 1024
_CREDIT = 256 * 1024
_UNREADABLE_S = 30.0
"""How long the stream of an ended attempt waits for a disk that cannot be read, such as that of an NFS server that restarts."""


class _LogStream:
    def __init__(self, stream: int, attempt: str, directory: str, segment: LogSegment, offset: int) -> None:
        self.stream = stream
        self.attempt = attempt
        self.directory = directory
        self.segment = segment
        self.offset = offset
        self.credit = _CREDIT
        self.attempt_has_ended = False
        self.fd: Optional[int] = None
        self._unreadable_since: Optional[float] = None

    def read(self) -> Optional[bytes]:
        """Return the next piece of data; empty if there is none; None if the disk cannot be read now."""
        data = self._next_piece()
        self._unreadable_since = (self._unreadable_since or time.monotonic()) if data is None else None
        return data

    @property
    def is_unreadable(self) -> bool:
        """Whether the disk could not be read for ``_UNREADABLE_S``."""
        return self._unreadable_since is not None and time.monotonic() - self._unreadable_since > _UNREADABLE_S

    def _next_piece(self) -> Optional[bytes]:
        while True:
            data = self._read()
            if data or data is None:
                return data
            following = log_files.next_of(self.directory, self.segment)
            if following is None:
                return b""
            # Output may have been written to this file after the read above, before the next file was created.
            data = self._read()
            if data or data is None:
                return data
            self.close()
            self.segment, self.offset = following, 0

    def size(self) -> int:
        """Return the length of the whole output for a log, or of the current file for an index or samples.

        The current file counts as empty if it is not open, because it does not exist or cannot be read.
        """
        length = os.fstat(self.fd).st_size if self.fd is not None else 0
        return length + (self.segment.start if self.segment.kind == "log" else 0)

    def _read(self) -> Optional[bytes]:
        """Return the data at the current offset; None if the disk cannot be read now."""
        try:
            if self.fd is None:
                path = os.path.join(self.directory, self.segment.name)
                self.fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
            return os.pread(self.fd, min(_PIECE, self.credit), self.offset)
        except FileNotFoundError:
            return b""  # this segment has been removed, or the file does not exist yet
        except OSError:
            self.close()  # a bad disk, or an NFS server that restarted, after which the file must be opened again
            return None

    def close(self) -> None:
        if self.fd is not None:
            os.close(self.fd)
            self.fd = None


class LogStreams:
    """All streams of a connection.

    ``push(event)`` queues an event as bulk data, which urgent messages overtake. ``has_room()`` returns whether the queue
    can take more events.
    """

    def __init__(self, push: Callable[[Json], None], has_room: Callable[[], bool]) -> None:
        self._push = push
        self._has_room = has_room
        self._streams: Dict[int, _LogStream] = {}

    def add(self, stream: int, attempt: str, directory: str, name: str, offset: int, has_ended: bool) -> None:
        """Start a stream at an offset of the file ``name``. A stream with the same number is replaced.

        With ``has_ended``, the attempt has ended, so the stream ends after the remaining output. Raises ``OpError``
        (``bad_request``) for a wrong name or offset.
        """
        segment = log_files.parse(name)
        if segment is None:
            raise OpError("bad_request", "`file` must be the name of a log file, such as `output.log`")
        if offset < 0:
            raise OpError("bad_request", "`offset` must not be negative")
        self.remove(stream)
        log = _LogStream(stream, attempt, directory, segment, offset)
        log.attempt_has_ended = has_ended
        self._streams[stream] = log
        self.pump()

    def remove(self, stream: int) -> None:
        """End a stream."""
        log = self._streams.pop(stream, None)
        if log is not None:
            log.close()

    def credit(self, stream: int, size: int) -> None:
        """Record that the supervisor has processed ``size`` bytes. Does nothing if the stream has ended."""
        log = self._streams.get(stream)
        if log is not None:
            log.credit = min(_CREDIT, log.credit + max(0, size))
            self.pump()

    def on_output(self, attempt: str, has_ended: bool) -> None:
        """Send new output of an attempt, if there is any. With ``has_ended``, its streams end after the remaining output."""
        for log in self._streams.values():
            if log.attempt == attempt:
                log.attempt_has_ended = log.attempt_has_ended or has_ended
        self.pump(attempt)

    def pump(self, attempt: Optional[str] = None) -> None:
        """Send available data while the queue has room, one piece of each stream in turn.

        With ``attempt``, send only the data of its streams.
        """
        active: List[_LogStream] = [log for log in self._streams.values() if attempt is None or log.attempt == attempt]
        while active and self._has_room():
            for log in list(active):
                if not self._has_room() or not self._push_piece(log):
                    active.remove(log)

    def _push_piece(self, log: _LogStream) -> bool:
        if not log.credit:
            return False
        attempt_has_ended = log.attempt_has_ended
        data = log.read()
        if data:
            text = binascii.b2a_base64(data, newline=False).decode("ascii")
            name = log.segment.name
            self._push({"event": "data", "stream": log.stream, "file": name, "offset": log.offset, "data": text})
            log.offset += len(data)
            log.credit -= len(data)
            return True
        if attempt_has_ended and (data is not None or log.is_unreadable):
            self._push({"event": "eof", "stream": log.stream, "size": log.size()})
            self.remove(log.stream)
        return False
