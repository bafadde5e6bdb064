"""The output of a command: read from its pipe, stamped, written; never blocking the command, even on a full disk."""

from __future__ import annotations

import os
import struct

from distflow.runtime.clock import now

__all__ = ["READ", "Output"]

READ = 65536
_STAMP = struct.Struct("<dQ")
_DRAIN = 4 * 1024 * 1024


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

    def pump(self) -> int:
        """Take one read's worth. Returns its length, 0 at the end of the output, -1 when nothing is there now."""
        try:
            data = os.read(self._pipe, READ)
        except BlockingIOError:
            return -1
        if data:
            self._write(data)
        return len(data)

    def drain(self) -> None:
        """Take what is left once the writers are gone: not until end of file, which a stranger could withhold."""
        taken = 0
        while taken < _DRAIN:
            got = self.pump()
            if got <= 0:
                return
            taken += got

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
