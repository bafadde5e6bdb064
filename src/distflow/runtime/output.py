"""The output of a command: read from its pipe, stamped, written; never blocking the command, even on a full disk."""

from __future__ import annotations

import os
import struct
import time
from typing import Optional

from distflow.runtime.clock import now
from distflow.runtime.masking import Mask, Stream

__all__ = ["READ", "Output"]

READ = 65536
_STAMP = struct.Struct("<dQ")
_DRAIN = 4 * 1024 * 1024
_HELD_S = 0.5
"""How long an end that may be the beginning of a secret is held back."""


class Output:
    """Moves bytes from ``pipe`` (non-blocking) into the log and a record of each read into the index (both O_APPEND)."""

    def __init__(self, pipe: int, log: int, index: int, lost: int = 0) -> None:
        self._pipe = pipe
        self._log = log
        self._index = index
        self.size = os.fstat(log).st_size
        """Bytes in the log."""
        self.lost = lost
        """Bytes that were read and could not be written."""
        self.due_at = float("inf")
        """When ``flush`` is due, on the monotonic clock."""
        self._stream: Optional[Stream] = None

    def mask(self, mask: Optional[Mask]) -> None:
        """Write nothing from now on that this would hide."""
        self._stream = Stream(mask) if mask is not None else None

    def pump(self) -> int:
        """Take one read's worth. Returns its length, 0 at the end of the output, -1 when nothing is there now."""
        try:
            data = os.read(self._pipe, READ)
        except BlockingIOError:
            return -1
        if data and self._stream is None:
            self._write(data)
        elif data and self._stream is not None:
            self._write(self._stream.feed(data))
            self.due_at = time.monotonic() + _HELD_S if self._stream.holds else float("inf")
        return len(data)

    def flush(self) -> None:
        """Write what was held back."""
        self.due_at = float("inf")
        if self._stream is not None:
            self._write(self._stream.flush())

    def drain(self) -> None:
        """Take what is left once the writers are gone: not until end of file, which a stranger could withhold."""
        taken = 0
        while taken < _DRAIN:
            got = self.pump()
            if got <= 0:
                break
            taken += got
        self.flush()

    def _write(self, data: bytes) -> None:
        offset = self.size
        view = memoryview(data)
        while view:
            try:
                view = view[os.write(self._log, view) :]
            except OSError:
                break
        self.lost += len(view)
        self.size += len(data) - len(view)
        if self.size > offset:
            try:
                os.write(self._index, _STAMP.pack(now(), offset))
            except OSError:
                return  # the text matters more than its time
