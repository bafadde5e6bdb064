"""The submitter at the other end of a service's standard input and output, which is given up when it is silent.

A connection that was cut does not end: the kernel may notice after hours, and the service would stay on the node until then.
The submitter therefore sends something every few seconds, an empty line or an empty frame where it has nothing to say.
"""

from __future__ import annotations

import os
import select
import time

from distflow.runtime.wire import Json, encode

__all__ = ["SILENCE_S", "Gone", "Peer"]

SILENCE_S = 30.0
"""A submitter that sends nothing for so long is gone."""
_READ = 65536


class Gone(Exception):
    """The connection ended, or the submitter has sent nothing for ``SILENCE_S``."""


class Peer:
    """Reads and writes of one thread. All but ``look`` may wait, and raise ``Gone`` instead of waiting for ever."""

    def __init__(self, incoming: int = 0, outgoing: int = 1) -> None:
        """Take over two descriptors; ``outgoing`` -1 for a reader only."""
        self._in = incoming
        self._out = outgoing
        self._received = bytearray()
        self._heard_at = time.monotonic()
        if outgoing >= 0:
            os.set_blocking(outgoing, False)  # a pipe that has room for some bytes has not room for all

    def line(self, limit: int) -> bytes:
        """Return the next line that is not empty, or its first ``limit`` bytes; ``b""`` when the connection ended before it."""
        while True:
            end = self._received.find(b"\n")
            if end >= 0 or len(self._received) >= limit:
                taken = self._take(min(end + 1 if end >= 0 else limit, limit))
                if taken.strip():
                    return taken
                continue
            try:
                self._wait(is_writing=False)
            except Gone:
                return b""

    def read(self, size: int) -> bytes:
        """Return ``size`` bytes; fewer only when the connection ended before them (``frames.Source``)."""
        while len(self._received) < size:
            try:
                self._wait(is_writing=False)
            except Gone:
                break
        return self._take(size)

    def write(self, data: bytes) -> None:
        """Write everything. The submitter may take long to read it; meanwhile it must be heard."""
        view = memoryview(data)
        while view:
            try:
                view = view[os.write(self._out, view[:_READ]) :]
            except BlockingIOError:
                self._wait(is_writing=True)
            except OSError as error:
                raise Gone from error

    def say(self, message: Json) -> None:
        """Write one message as a line."""
        self.write(encode(message))

    def look(self) -> None:
        """Raise ``Gone`` when the submitter is: for work that neither reads nor writes for long."""
        self._hear()
        if time.monotonic() - self._heard_at > SILENCE_S:
            raise Gone

    def _take(self, size: int) -> bytes:
        taken = bytes(self._received[:size])
        del self._received[:size]
        return taken

    def _wait(self, *, is_writing: bool) -> None:
        """Wait until something was heard, or may be written."""
        before = len(self._received)
        self._hear()
        self._heard_at = time.monotonic()  # the time before was this service's own: it did not listen
        poll = select.poll()
        poll.register(self._in, select.POLLIN)
        if is_writing:
            poll.register(self._out, select.POLLOUT)
        while len(self._received) == before:
            left = self._heard_at + SILENCE_S - time.monotonic()
            if left <= 0:
                raise Gone
            if any(fd == self._out for fd, _ in poll.poll(left * 1000)):
                return
            self._hear()

    def _hear(self) -> None:
        """Take what has come; nothing when nothing has."""
        poll = select.poll()
        poll.register(self._in, select.POLLIN)
        if not poll.poll(0):
            return
        try:
            data = os.read(self._in, _READ)
        except OSError as error:
            raise Gone from error
        if not data:
            raise Gone
        self._heard_at = time.monotonic()
        self._received += data
