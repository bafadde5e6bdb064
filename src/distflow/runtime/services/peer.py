"""The submitter at the other end of a service's standard input and output. If it is silent, the service exits.

A broken connection does not end: the kernel may notice it only after hours, and the service would stay on the node until then.
The submitter therefore sends an empty line or an empty frame every few seconds if it has nothing else to send.
"""

from __future__ import annotations

import os
import select
import time

from distflow.runtime.wire import Json, encode

__all__ = ["SILENCE_S", "Gone", "Peer"]

SILENCE_S = 30.0
"""A submitter that sends nothing for this time counts as gone."""
_READ = 65536


class Gone(Exception):
    """The connection ended, or the submitter has sent nothing for ``SILENCE_S``."""


class Peer:
    """Reads and writes of one thread. All methods except ``check`` may block, and raise ``Gone`` after a silence."""

    def __init__(self, incoming: int = 0, outgoing: int = 1) -> None:
        """Take over two descriptors. ``outgoing`` is -1 for a reader only."""
        self._in = incoming
        self._out = outgoing
        self._received = bytearray()
        self._received_at = time.monotonic()
        if outgoing >= 0:
            os.set_blocking(outgoing, False)  # a blocking write would wait until the pipe has space for all bytes

    def line(self, limit: int) -> bytes:
        """Return the next line that is not empty, or its first ``limit`` bytes; ``b""`` if the connection ended before it."""
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
        """Return ``size`` bytes, or fewer if the connection ended before them (``frames.Source``)."""
        while len(self._received) < size:
            try:
                self._wait(is_writing=False)
            except Gone:
                break
        return self._take(size)

    def write(self, data: bytes) -> None:
        """Write all of ``data``. The submitter may read slowly, but must send its signs meanwhile."""
        view = memoryview(data)
        while view:
            try:
                view = view[os.write(self._out, view[:_READ]) :]
            except BlockingIOError:
                self._wait(is_writing=True)
            except OSError as error:
                raise Gone from error

    def send(self, message: Json) -> None:
        """Write one message as a line."""
        self.write(encode(message))

    def check(self) -> None:
        """Raise ``Gone`` if the submitter is gone. For work that does not read or write for long."""
        self._receive()
        if time.monotonic() - self._received_at > SILENCE_S:
            raise Gone

    def _take(self, size: int) -> bytes:
        taken = bytes(self._received[:size])
        del self._received[:size]
        return taken

    def _wait(self, *, is_writing: bool) -> None:
        """Wait until data was received or can be written."""
        before = len(self._received)
        self._receive()
        self._received_at = time.monotonic()  # before, the service did not read, so the submitter's silence does not count
        poll = select.poll()
        poll.register(self._in, select.POLLIN)
        if is_writing:
            poll.register(self._out, select.POLLOUT)
        while len(self._received) == before:
            left = self._received_at + SILENCE_S - time.monotonic()
            if left <= 0:
                raise Gone
            if any(fd == self._out for fd, _ in poll.poll(left * 1000)):
                return
            self._receive()

    def _receive(self) -> None:
        """Read available data, without waiting."""
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
        self._received_at = time.monotonic()
        self._received += data
