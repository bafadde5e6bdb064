"""Locks (``flock``) on files and directories that others may remove: a lock on what has no name keeps nobody out."""

from __future__ import annotations

import os
from typing import Optional

__all__ = ["is_named"]


def is_named(fd: int, name: str, directory: Optional[int] = None) -> bool:
    """Whether what was opened still has this name, a path or one in an open directory: it may have been removed meanwhile."""
    try:
        return os.stat(name, dir_fd=directory, follow_symlinks=False).st_ino == os.fstat(fd).st_ino
    except FileNotFoundError:
        return False
