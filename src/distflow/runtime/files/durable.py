"""Files that survive a power cut either complete or not at all, and the disk space reserved for distflow's files."""

from __future__ import annotations

import os
from typing import IO, Any, Optional, Tuple

__all__ = ["is_named", "publish", "reserve_bytes"]


_RESERVE = 512 << 20
_SHARE = 20
"""On small disks, the reserve is one part in this number of the disk."""


def publish(file: IO[Any], path: str) -> None:
    """Give a complete, open file its final name, once its content is on the disk.

    Without that order, a power cut can leave the name with no content or half of it. Raises ``OSError``.
    """
    file.flush()
    os.fsync(file.fileno())
    os.replace(file.name, path)


def reserve_bytes(folder: str, coming: int = 0) -> Tuple[int, int]:
    """Return how much of the reserve is missing on the disk of a directory, and how large the reserve is.

    ``coming``: bytes that are still to be written there.
    """
    while not os.path.exists(folder) and folder != os.path.dirname(folder):
        folder = os.path.dirname(folder)
    found = os.statvfs(folder)
    reserve = min(_RESERVE, found.f_blocks * found.f_frsize // _SHARE)
    return max(0, reserve + coming - found.f_bavail * found.f_frsize), reserve


def is_named(fd: int, name: str, directory: Optional[int] = None) -> bool:
    """Whether an open file still has this name; it may have been removed meanwhile.

    ``name`` is a path, or a name in the open ``directory``.
    """
    try:
        return os.stat(name, dir_fd=directory, follow_symlinks=False).st_ino == os.fstat(fd).st_ino
    except FileNotFoundError:
        return False
