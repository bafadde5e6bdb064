"""The node's clock: the one module of the runtime that reads it, and the file system's clock."""

from __future__ import annotations

import os
import time

from distflow.runtime.files.root_directory import MARKER

__all__ = ["file_system_now", "now"]


def now() -> float:
    """Seconds since the epoch on this node. Deadlines use ``time.monotonic`` instead: this clock may be set."""
    return time.time()  # noqa: TID251 - the runtime has no Clock to be given: it is what the node's clock says


def file_system_now(root: str) -> float:
    """The time on the clock that dates the files below ``root``: of a file server, it may differ from this machine's clock."""
    marker = os.path.join(root, MARKER)
    try:
        os.utime(marker)
        return os.stat(marker).st_mtime
    except OSError:
        return now()  # the disk is full or read-only
