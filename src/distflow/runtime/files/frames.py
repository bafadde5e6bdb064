"""How a blob travels: frames of at most a mebibyte, packed where that pays; taken into a part, checked, and given its name.

Both ends use it: ``receiver`` with ``staging`` of ``backends.machines.transfer``, and ``sender`` with ``fetching`` there.
A frame is ``>IB``: the length of what follows and its kind (0 as it is, 1 zlib, 2 why there is no more). See
docs/agent-protocol.md.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
import zlib
from typing import BinaryIO, Callable, Iterator, Optional, Protocol, Tuple

from distflow.runtime.files.blobs import Part
from distflow.runtime.untrusted import decode_object
from distflow.runtime.wire import Json, OpError

__all__ = ["FRAME", "LARGEST_FRAME", "RAW", "ZLIB", "Source", "error_frame", "frames", "receive"]

FRAME = struct.Struct(">IB")
RAW, ZLIB, ERROR = 0, 1, 2
LARGEST_FRAME = 1 << 20
"""Bytes of a frame, packed or not."""
_READ = 512 << 10
_LEVEL = 1
_WORTHWHILE = 0.9
"""A frame that shrinks to less is sent packed."""
_SKIPPED = 31
"""After one that did not, so many go as they are, before packing is tried again."""
_SAMPLE = 32 << 10
"""Bytes of a frame that are packed to find out."""
_HASHED_AT_ONCE = 1 << 20


class Source(Protocol):
    """Where frames come from."""

    def read(self, size: int) -> bytes:
        """Return ``size`` bytes; fewer only at the end."""


def frames(source: BinaryIO) -> Iterator[Tuple[int, bytes]]:
    """Yield the frames of what is left in ``source``, each with the bytes that it stands for."""
    skip = 0
    while True:
        data = source.read(_READ)
        if not data:
            return
        kind, content = RAW, data
        if skip:
            skip -= 1
        elif len(zlib.compress(data[:_SAMPLE], _LEVEL)) < _WORTHWHILE * len(data[:_SAMPLE]):
            kind, content = ZLIB, zlib.compress(data, _LEVEL)
        else:
            skip = _SKIPPED
        yield len(data), FRAME.pack(len(content), kind) + content


def error_frame(error: OpError) -> bytes:
    """The frame that says why there is no more."""
    said = json.dumps(error.as_json()).encode("utf-8")
    return FRAME.pack(len(said), ERROR) + said


def receive(
    source: Source,
    path: str,
    name: str,
    size: int,
    say: Callable[[Json], None],
    told: Callable[[int], None] = lambda _: None,
    is_here: Callable[[str, int], bool] = lambda path, size: os.path.isfile(path) and os.path.getsize(path) == size,
) -> bool:
    """Take the blob ``name`` (its SHA-256) to ``path``: ``say`` how much is here, then read the rest. False: it broke off.

    What came before it broke off stays, and is taken up by the next call. ``told`` hears how much is here. Raises ``damaged``,
    and what the other side says.
    """
    if is_here(path, size):
        say({"at": size})
        told(size)
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
        say({"at": at})
        told(at)
        while at < size:
            frame = _frame(source)
            if frame is None:
                os.close(part.fd)
                return False
            digest.update(frame)
            view = memoryview(frame)
            while view:
                view = view[os.write(part.fd, view) :]
            at += len(frame)
            told(at)
    except BaseException:
        os.close(part.fd)
        raise
    if at != size or digest.hexdigest() != name:
        part.drop()
        raise OpError("damaged", "the blob arrived damaged: {} of {} bytes, hash differs".format(at, size))
    part.finish()
    return True


def _error_of(data: bytes) -> OpError:
    """Return the error that a frame carries."""
    try:
        said = decode_object(data)
        return OpError(str(said["kind"]), str(said["message"]))
    except (ValueError, KeyError) as error:
        return OpError("bad_request", "an error that cannot be read: {}".format(error))


def _frame(source: Source) -> Optional[bytes]:
    """One frame's content; None at the end of the stream."""
    head = source.read(FRAME.size)
    if len(head) < FRAME.size:
        return None
    length, kind = FRAME.unpack(head)
    if length > LARGEST_FRAME or kind not in (RAW, ZLIB, ERROR):
        raise OpError("bad_request", "a frame of {} bytes, kind {}".format(length, kind))
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
        raise OpError("damaged", "a frame cannot be unpacked: {}".format(error)) from error
