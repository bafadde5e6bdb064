"""The node's clock and the file system's clock. Other modules of the runtime do not call ``time.time``."""

from __future__ import annotations

import os
import time

from distflow.runtime.files.root_directory import MARKER

__all__ = ["file_system_now", "now"]


def now() -> float:
    """Return seconds since the epoch on this node. Use ``time.monotonic`` for deadlines, because this clock may be changed."""
    return time.time()  # noqa: TID251 - this is the node's clock


def file_system_now(root: str) -> float:
    """Return the time of the clock that sets the times of files below ``root``.

    A file server's clock may differ from this machine's. If the marker file in ``root`` cannot be touched, this is ``now``.
    """
    marker = os.path.join(root, MARKER)
    try:
        os.utime(marker)
        return os.stat(marker).st_mtime
    except OSError:
        return now()  # for example, the disk is full or read-only
