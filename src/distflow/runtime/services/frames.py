"""The transfer format of blobs, and the connection of a service on a node to the submitter, which started the service.

A blob is sent in frames of at most 1 MiB. A frame is compressed if that is likely to save more than 10%. The receiver writes
the content to a file with the suffix ``.part``, verifies its checksum, and renames it. Both ends use this module: ``receiver``,
``sender`` and ``output_server`` on the node, and ``backends.machines.connection``. A frame's header is ``>IB``: the length and
the kind of its content (0 plain, 1 zlib, 2 the error that ended the transfer). See docs/agent-protocol.md.

``Peer`` is the service's connection to the submitter: its standard input and output. The kernel may notice a broken connection
only after hours, and the service would stay on the node until then. The submitter therefore sends an empty line or an empty
frame every few seconds if it has nothing else to send. The service exits if the submitter sends nothing for ``SILENCE_S``.
"""

from __future__ import annotations

import hashlib
import json
import os
import select
import struct
import time
import zlib

from distflow.protocol.light_typing import BinaryIO, Callable, Iterator, Optional, Protocol, Tuple
from distflow.runtime.files.blobs import Part
from distflow.runtime.untrusted import decode_object
from distflow.runtime.wire import Json, OpError, encode

__all__ = [
    "FRAME",
    "LARGEST_FRAME",
    "RAW",
    "SILENCE_S",
    "ZLIB",
    "FrameSource",
    "Gone",
    "Peer",
    "error_frame",
    "frames",
    "read_frame",
    "receive",
]


FRAME = struct.Struct(">IB")
RAW, ZLIB, ERROR = 0, 1, 2
LARGEST_FRAME = 1 << 20
"""Maximum bytes of a frame, compressed or not."""
_READ = 512 << 10
_LEVEL = 1
_MAX_RATIO = 0.9
"""A frame is compressed if its sample shrinks below this fraction."""
_PLAIN_RUN = 31
"""Number of frames that are sent uncompressed, without a test, after a frame that did not compress well."""
_SAMPLE = 32 << 10
"""Bytes of a frame that are compressed as a test."""
_HASHED_AT_ONCE = 1 << 20


class FrameSource(Protocol):
    """A source of frames."""

    def read(self, size: int) -> bytes:
        """Return ``size`` bytes; fewer only at the end."""


def frames(source: BinaryIO) -> Iterator[Tuple[int, bytes]]:
    """Yield the frames of the rest of ``source``, each with its number of uncompressed bytes."""
    skip = 0
    while True:
        data = source.read(_READ)
        if not data:
            return
        kind, content = RAW, data
        if skip:
            skip -= 1
        elif len(zlib.compress(data[:_SAMPLE], _LEVEL)) < _MAX_RATIO * len(data[:_SAMPLE]):
            kind, content = ZLIB, zlib.compress(data, _LEVEL)
        else:
            skip = _PLAIN_RUN
        yield len(data), FRAME.pack(len(content), kind) + content


def error_frame(error: OpError) -> bytes:
    """Return a frame with the error that ended the transfer."""
    content = json.dumps(error.as_json()).encode("utf-8")
    return FRAME.pack(len(content), ERROR) + content


def receive(
    source: FrameSource,
    path: str,
    name: str,
    size: int,
    send: Callable[[Json], None],
    on_progress: Callable[[int], None] = lambda _: None,
    is_complete: Callable[[str, int], bool] = lambda path, size: os.path.isfile(path) and os.path.getsize(path) == size,
) -> bool:
    """Receive the blob ``name`` (its SHA-256) to ``path``. Returns False if the transfer was interrupted.

    ``send`` gets the message with the number of bytes that were received before. Then the remaining bytes are read. Data of an
    interrupted transfer is kept, and the next call continues after it. ``on_progress`` gets the number of received bytes,
    including earlier ones. ``is_complete`` returns whether a path is the complete blob of a size. Raises
    ``OpError``: ``damaged``, ``bad_request`` for an invalid frame, or the sender's error. Raises ``OSError`` if the blob cannot
    be written.
    """
    if is_complete(path, size):
        send({"at": size})
        on_progress(size)
        return True
    part = Part(path)
    try:
        if part.size > size:
            os.ftruncate(part.fd, 0)
        digest = hashlib.sha256()
        at = 0
        while True:
            data = os.read(part.fd, _HASHED_AT_ONCE)
            if not data:
                break
            digest.update(data)
            at += len(data)
        send({"at": at})
        on_progress(at)
        while at < size:
            frame = read_frame(source)
            if frame is None:
                os.close(part.fd)
                return False
            digest.update(frame)
            view = memoryview(frame)
            while view:
                view = view[os.write(part.fd, view) :]
            at += len(frame)
            on_progress(at)
    except BaseException:
        os.close(part.fd)
        raise
    if at != size or digest.hexdigest() != name:
        part.drop()
        detail = "wrong checksum" if at == size else "{} bytes instead of {}".format(at, size)
        raise OpError("damaged", "the received blob is damaged: {}".format(detail))
    part.finish()
    return True


def _error_of(data: bytes) -> OpError:
    """Return the error in a frame."""
    try:
        content = decode_object(data)
        return OpError.from_json({"kind": content["kind"], "message": content["message"]})
    except (ValueError, KeyError) as error:
        return OpError("bad_request", "the sender reported an error that cannot be decoded: {}".format(error))


def read_frame(source: FrameSource) -> Optional[bytes]:
    """Return a frame's uncompressed content; None at the end of the stream.

    Raises ``OpError`` for an invalid frame, or the error in the frame.
    """
    head = source.read(FRAME.size)
    if len(head) < FRAME.size:
        return None
    length, kind = FRAME.unpack(head)
    if length > LARGEST_FRAME or kind not in (RAW, ZLIB, ERROR):
        raise OpError("bad_request", "a frame has an invalid header: {} bytes, kind {}".format(length, kind))
    data = source.read(length)
    if len(data) < length:
        return None
    if kind == RAW:
        return data
    if kind == ERROR:
        raise _error_of(data)
    unpack = zlib.decompressobj()
    try:
        return unpack.decompress(data, LARGEST_FRAME)
    except zlib.error as error:
        raise OpError("damaged", "a frame cannot be decompressed: {}".format(error)) from error


SILENCE_S = 30.0
"""A submitter that sends nothing for this time counts as gone."""
_PEER_READ = 65536


class Gone(Exception):
    """The connection ended, or the submitter has sent nothing for ``SILENCE_S``."""


class Peer:
    """The connection to the submitter, for one thread.

    All methods except ``check`` block until the data was read or written. When the submitter is gone, ``line`` and ``read``
    return less data, and the other methods raise ``Gone``.
    """

    def __init__(self, incoming: int = 0, outgoing: int = 1) -> None:
        """Take over two descriptors. ``outgoing`` is -1 if nothing is written."""
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
        """Return ``size`` bytes, or fewer if the connection ended before them (``frames.FrameSource``)."""
        while len(self._received) < size:
            try:
                self._wait(is_writing=False)
            except Gone:
                break
        return self._take(size)

    def write(self, data: bytes) -> None:
        """Write all of ``data``. The submitter may read slowly if it continues to send data or empty lines."""
        view = memoryview(data)
        while view:
            try:
                view = view[os.write(self._out, view[:_PEER_READ]) :]
            except BlockingIOError:
                self._wait(is_writing=True)
            except OSError as error:
                raise Gone from error

    def send(self, message: Json) -> None:
        """Write one message as a line."""
        self.write(encode(message))

    def check(self, wait_s: float = 0.0) -> None:
        """Raise ``Gone`` if the submitter is gone. Call this regularly during long work without reads and writes.

        ``wait_s``: how long to wait for data or the end of the connection.
        """
        self._receive(wait_s)
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
        self._received_at = time.monotonic()  # the silence counts from now on, because the service did not read before
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

    def _receive(self, wait_s: float = 0.0) -> None:
        """Read available data; wait for it at most ``wait_s``."""
        poll = select.poll()
        poll.register(self._in, select.POLLIN)
        if not poll.poll(wait_s * 1000):
            return
        try:
            data = os.read(self._in, _PEER_READ)
        except OSError as error:
            raise Gone from error
        if not data:
            raise Gone
        self._received_at = time.monotonic()
        self._received += data
