"""Compress an archive in up to 8 threads, and hash it in another one, while its files are still being read."""

from __future__ import annotations

import hashlib
import os
import struct
import zlib
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import IO

__all__ = ["ParallelGzip"]

_HEADER = b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\xff"
"""The header of a gzip member without a name and a time."""
_LEVEL = 1
"""The level of zlib. Higher levels usually take longer than the transfer of the bytes that they save."""
_SAMPLE_COUNT = 4
_SAMPLE_BYTES = 4 << 10
_INCOMPRESSIBLE_RATIO = 0.9
"""A block is not compressed if compressed samples of it keep more than this share of their size."""


class ParallelGzip:
    """A writer that compresses to a file in gzip format, as a context manager.

    Each call of ``write`` becomes one gzip member, so the result does not depend on the number of cores. Blocks that would
    hardly become smaller, such as weights and images, are stored as they are. The SHA-256 of the archive is computed at the
    same time. Threads suffice, because zlib and hashlib release the GIL.
    """

    def __init__(self, sink: IO[bytes]) -> None:
        """Compress to ``sink``."""
        self._sink = sink
        self._hasher = hashlib.sha256()
        workers = min(8, os.cpu_count() or 1)
        self._compressing = ThreadPoolExecutor(workers)
        self._writing = ThreadPoolExecutor(1)
        self._pending: deque[Future[None]] = deque()
        self._most_pending = 2 * workers + 2
        self._has_failed = False

    @property
    def digest(self) -> str:
        """The SHA-256 of the compressed data, in hexadecimal. Complete after the end of the context."""
        return self._hasher.hexdigest()

    def write(self, data: bytes) -> int:
        """Compress a block, perhaps after waiting for earlier ones. Raises ``OSError`` if one of those could not be written."""
        while len(self._pending) >= self._most_pending:
            self._pending.popleft().result()
        block = self._compressing.submit(self._compress, bytes(data))
        self._pending.append(self._writing.submit(self._store, block))
        return len(data)

    def __enter__(self) -> ParallelGzip:
        """Return the writer."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Write the rest, unless there was an error. Raises ``OSError`` if it could not be written."""
        try:
            while self._pending and error is None:
                self._pending.popleft().result()
        finally:
            self._compressing.shutdown(cancel_futures=True)
            self._writing.shutdown(cancel_futures=True)

    def _compress(self, data: bytes) -> bytes:
        packer = zlib.compressobj(0 if _is_incompressible(data) else _LEVEL, zlib.DEFLATED, -zlib.MAX_WBITS)
        end = struct.pack("<II", zlib.crc32(data), len(data) & 0xFFFFFFFF)
        return b"".join((_HEADER, packer.compress(data), packer.flush(), end))

    def _store(self, block: Future[bytes]) -> None:
        if self._has_failed:
            return  # the future of the failed block reports the error to the caller
        try:
            data = block.result()
            self._hasher.update(data)
            self._sink.write(data)
        except BaseException:
            self._has_failed = True
            raise


def _is_incompressible(data: bytes) -> bool:
    """Return whether evenly spaced samples of a block can hardly be compressed; false for a block of less than 16 KiB."""
    step = len(data) // _SAMPLE_COUNT
    if step < _SAMPLE_BYTES:
        return False
    samples = b"".join(data[at : at + _SAMPLE_BYTES] for at in range(step // 2, len(data) - _SAMPLE_BYTES, step))
    return len(zlib.compress(samples, _LEVEL)) > len(samples) * _INCOMPRESSIBLE_RATIO
