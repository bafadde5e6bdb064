"""The receiver: takes blobs as one stream over a connection of its own, so that neither logs nor heartbeats wait for them.

Standard input, for each blob: a line ``{"hash", "size"}``; after the answer ``{"at": n}``, which says how much of it is here
already, frames with the rest (``>IB``: length and kind, 0 as it is or 1 zlib, then that many bytes). Standard output:
``{"at": n}``, at the end ``{"done": true}``, or ``{"error": {"kind", "message"}}``, after which nothing more is read.
See docs/agent-protocol.md.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
import sys
import zlib
from typing import BinaryIO, Optional

from distflow.runtime import processes
from distflow.runtime.blobs import Part, is_whole, path_of
from distflow.runtime.wire import Json, OpError, encode

__all__ = ["FRAME", "LARGEST_FRAME", "RAW", "ZLIB", "serve"]

FRAME = struct.Struct(">IB")
RAW, ZLIB = 0, 1
LARGEST_FRAME = 1 << 20
"""Bytes of a frame, packed or not."""
_HASHED_AT_ONCE = 1 << 20


def serve(root: str, _umask: int) -> None:
    """Receive until the other side has no more."""
    processes.rename_self("df-receiver")
    source = sys.stdin.buffer
    while True:
        line = source.readline(4096)
        if not line:
            return None
        try:
            blob = json.loads(line)
            _receive(source, path_of(root, blob["hash"]), blob["hash"], int(blob["size"]))
        except OpError as error:
            return _refuse(error)
        except OSError as error:
            return _refuse(OpError.from_os(error, "the blob cannot be written"))
        except (KeyError, TypeError, ValueError) as error:
            return _refuse(OpError("bad_request", "this is no blob: {!r}".format(error)))


def _receive(source: BinaryIO, path: str, name: str, size: int) -> None:
    if is_whole(path):
        _say({"at": size})
        _say({"done": True})
        return
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
        _say({"at": at})
        while at < size:
            frame = _frame(source)
            if frame is None:
                sys.exit(1)  # it broke off: what is here stays
            digest.update(frame)
            view = memoryview(frame)
            while view:
                view = view[os.write(part.fd, view) :]
            at += len(frame)
    except BaseException:
        os.close(part.fd)
        raise
    if at != size or digest.hexdigest() != name:
        part.drop()
        raise OpError("damaged", "the blob arrived damaged: {} of {} bytes, hash differs".format(at, size))
    part.finish()
    _say({"done": True})


def _frame(source: BinaryIO) -> Optional[bytes]:
    """One frame's content; None at the end of the stream."""
    head = source.read(FRAME.size)
    if len(head) < FRAME.size:
        return None
    length, kind = FRAME.unpack(head)
    if length > LARGEST_FRAME or kind not in (RAW, ZLIB):
        raise OpError("bad_request", "a frame of {} bytes, kind {}".format(length, kind))
    data = source.read(length)
    if len(data) < length:
        return None
    if kind == RAW:
        return data
    unpack = zlib.decompressobj()
    try:
        return unpack.decompress(data, LARGEST_FRAME)
    except zlib.error as error:
        raise OpError("damaged", "a frame cannot be unpacked: {}".format(error)) from error


def _say(message: Json) -> None:
    sys.stdout.buffer.write(encode(message))
    sys.stdout.buffer.flush()


def _refuse(error: OpError) -> None:
    _say({"error": error.as_json()})
