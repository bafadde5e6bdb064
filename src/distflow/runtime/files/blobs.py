"""Files that are sent once and used by many attempts: ``<root>/blobs/<sha256>``.

The agent reports missing blobs, and ``services.receiver`` receives them. Incomplete blobs are kept under a ``.part`` name, so
that an interrupted transfer can be resumed.

Only one attempt at a time gets a hard link to the blob, and other attempts get a copy. Tasks may change their files.
Therefore the modification time of a complete blob gets a fixed fraction of a second (``_MARK`` nanoseconds), which any write
changes. A changed blob counts as missing. On file systems that do not keep such fractions, blobs are only copied.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat

from distflow.protocol.light_typing import List, Optional
from distflow.runtime.clock import now
from distflow.runtime.files import root_directory
from distflow.runtime.files.safe_files import open_locked
from distflow.runtime.guard.process_tree import size_text
from distflow.runtime.probes.facts import free_bytes
from distflow.runtime.wire import Json, OpError

__all__ = ["BLOBS", "Part", "earlier_blobs", "is_complete", "link_blob", "missing", "path_of"]

BLOBS = "blobs"
_NAME = r"[0-9a-f]{64}"
_PART = ".part"
_STALE_S = 86400.0
_MARK = 271_828_182
"""Nanoseconds of the modification time of a complete blob."""
_UNMARKED = ".unmarked"
"""A file that exists if the file system does not keep marks."""


def path_of(root: str, name: object) -> str:
    """Return a blob's path, whether it exists or not. A blob that an older distflow stored elsewhere is moved there.

    Raises ``bad_request`` for a name that is not a SHA-256.
    """
    if not isinstance(name, str) or not re.fullmatch(_NAME, name):
        raise OpError("bad_request", "`hash` must be a SHA-256 in hexadecimal")
    path = os.path.join(root, BLOBS, name)
    if not os.path.lexists(path):
        _adopt_earlier(root, name)
    return path


def earlier_blobs(root: str) -> List[str]:
    """Return the paths of complete blobs that an earlier version left next to the private directory (``root_directory``)."""
    earlier = root_directory.earlier_root(root)
    directory = os.path.join(earlier or root, BLOBS)
    if earlier is None or not root_directory.is_own_directory(directory):
        return []
    return [path for path in (os.path.join(directory, name) for name in sorted(os.listdir(directory))) if _is_ours(path)]


def _is_ours(path: str) -> bool:
    """Return whether an earlier version received this file: a complete blob of this user whose name is a SHA-256."""
    try:
        info = os.lstat(path)
    except OSError:
        return False
    is_own = stat.S_ISREG(info.st_mode) and info.st_uid == os.getuid()
    return is_own and re.fullmatch(_NAME, os.path.basename(path)) is not None and is_complete(path)


def _adopt_earlier(root: str, name: str) -> None:
    """Move a blob of an earlier version from its old place to the private directory. It may be the only copy."""
    earlier = root_directory.earlier_root(root)
    old = os.path.join(earlier or root, BLOBS, name)
    if earlier is None or not root_directory.is_own_directory(os.path.dirname(old)) or not _is_ours(old):
        return
    directory = os.path.join(root, BLOBS)
    os.makedirs(directory, mode=0o700, exist_ok=True)
    if not _keeps_marks(os.path.dirname(old)):
        _note_unmarked(directory)
    with contextlib.suppress(FileNotFoundError):  # another process has just moved it
        os.rename(old, os.path.join(directory, name))


def missing(root: str, blobs: List[Json]) -> List[str]:
    """Remove old parts, and return the hashes of the missing blobs. Raises ``no_space`` if they would not fit."""
    directory = os.path.join(root, BLOBS)
    os.makedirs(directory, mode=0o700, exist_ok=True)
    _sweep(directory)
    lacking, needed = [], 0
    for blob in blobs:
        path, size = path_of(root, blob["hash"]), int(blob["size"])
        if not is_complete(path, size):
            lacking.append(blob["hash"])
            needed += size - _size_of(path + _PART)
    free = free_bytes(directory)
    if free < needed:
        raise OpError(
            "no_space",
            "not enough disk space in `{}`: {} needed, {} free; free some, or set another `root`".format(
                directory, size_text(needed), size_text(free)
            ),
        )
    return lacking


def is_complete(path: str, size: Optional[int] = None) -> bool:
    """Return whether the blob is complete and unchanged.

    Pass its ``size`` if it is known, because a power cut may leave a mark without content. On file systems without marks, only
    existence and size are checked.
    """
    try:
        info = os.stat(path)
    except FileNotFoundError:
        return False
    if size is not None and info.st_size != size:
        return False
    return info.st_mtime_ns % 10**9 == _MARK or not _keeps_marks(os.path.dirname(path))


def link_blob(path: str, new: str) -> bool:
    """Link a complete blob to ``new`` if no other attempt has it. Returns False if it must be copied."""
    if not _keeps_marks(os.path.dirname(path)) or os.stat(path).st_nlink > 1:
        return False
    try:
        os.link(path, new)
    except OSError:
        return False  # some file systems have no hard links
    if os.stat(path).st_nlink > 2:
        os.unlink(new)  # another attempt linked it at the same moment
        return False
    return True


class Part:
    """An incomplete blob, locked by the process that receives or packs it."""

    def __init__(self, path: str) -> None:
        """Open or create the part of the blob at ``path``. ``fd`` is at its start."""
        self._final = path
        self.path = path + _PART
        os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
        fd, number = open_locked(self.path), 0
        while fd is None:
            # Another connection, possibly a broken one, is receiving this blob. Receive a second copy; the first complete one
            # is used.
            self.path = "{}.{}-{}{}".format(path, os.getpid(), number, _PART)
            fd, number = open_locked(self.path), number + 1
        self.fd = fd
        self.size = os.fstat(fd).st_size

    def finish(self, path: Optional[str] = None) -> None:
        """Sync, mark and close the complete part, and rename it to ``path``, by default the path of its blob."""
        os.fsync(self.fd)  # after a power cut, a name without the content would count as a complete blob
        os.utime(self.fd, ns=(int(now() * 1e9), int(now()) * 10**9 + _MARK))
        final = path or self._final
        if os.fstat(self.fd).st_mtime_ns % 10**9 != _MARK:
            _note_unmarked(os.path.dirname(final))
        os.rename(self.path, final)
        os.close(self.fd)

    def drop(self) -> None:
        """Remove and close a part that cannot be completed."""
        os.unlink(self.path)
        os.close(self.fd)


def _note_unmarked(directory: str) -> None:
    os.close(os.open(os.path.join(directory, _UNMARKED), os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o600))


def _keeps_marks(directory: str) -> bool:
    return not os.path.exists(os.path.join(directory, _UNMARKED))


def _size_of(path: str) -> int:
    try:
        return os.stat(path).st_size
    except OSError:
        return 0


def _sweep(directory: str) -> None:
    """Remove parts that have not changed for a day, unless a process has locked them."""
    for entry in os.listdir(directory):
        path = os.path.join(directory, entry)
        if not entry.endswith(_PART) or _age(path) < _STALE_S:
            continue
        fd = open_locked(path)
        if fd is not None:
            os.unlink(path)
            os.close(fd)


def _age(path: str) -> float:
    try:
        return now() - os.stat(path).st_mtime
    except OSError:
        return 0.0
