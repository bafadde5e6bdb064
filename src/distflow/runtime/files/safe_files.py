"""Safe files: paths that stay in a directory, files that a power cut does not leave incomplete, and a reserve of the disk."""

from __future__ import annotations

import fcntl
import os

from distflow.protocol.light_typing import IO, Any, Iterable, Optional, Set, Tuple
from distflow.runtime.wire import OpError

__all__ = ["check_mounts", "has_name", "open_locked", "path_inside", "publish", "reserve_bytes"]


_RESERVE = 512 << 20
_SHARE = 20
"""On small disks, the reserve is the size of the disk divided by this number."""


def publish(file: IO[Any], path: str) -> None:
    """Sync a complete, open file to the disk, and then rename it to ``path``.

    In another order, a power cut could leave an empty or incomplete file at ``path``. Raises ``OSError``.
    """
    file.flush()
    os.fsync(file.fileno())
    os.replace(file.name, path)


def reserve_bytes(folder: str, coming: int = 0) -> Tuple[int, int]:
    """Return the bytes that must be freed to keep the reserve of free space on a disk, and the size of the reserve.

    ``coming`` is the number of bytes that are still to be written there.
    """
    while not os.path.exists(folder) and folder != os.path.dirname(folder):
        folder = os.path.dirname(folder)
    found = os.statvfs(folder)
    reserve = min(_RESERVE, found.f_blocks * found.f_frsize // _SHARE)
    return max(0, reserve + coming - found.f_bavail * found.f_frsize), reserve


def has_name(fd: int, name: str, directory: Optional[int] = None) -> bool:
    """Return whether an open file still has this name; it may have been removed meanwhile.

    ``name`` is a path, or a name in the open ``directory``.
    """
    try:
        return os.stat(name, dir_fd=directory, follow_symlinks=False).st_ino == os.fstat(fd).st_ino
    except FileNotFoundError:
        return False


def open_locked(path: str) -> Optional[int]:
    """Open or create a file for reading and writing, and lock it. Returns None if another process has locked it."""
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            return None
        if has_name(fd, path):
            return fd
        os.close(fd)  # it was renamed or removed meanwhile


def path_inside(top: str, relative: str, known: Optional[Set[str]] = None) -> str:
    """Return the path of ``relative`` below ``top``.

    Raises ``bad_request`` if ``relative`` is empty or absolute, if it contains NUL or the component ``..``, or if links in its
    parent directories lead outside. The last component may be a link to anywhere.

    ``known`` caches directories that were found to be inside. The caller must clear it after creating a link.
    """
    if not relative or os.path.isabs(relative) or ".." in relative.split("/") or "\0" in relative:
        raise OpError(
            "bad_request", "the path {!r} must be relative and not empty, without `..` and NUL bytes".format(relative)
        )
    path = os.path.normpath(os.path.join(top, relative))
    if known is not None and os.path.dirname(path) in known:
        return path
    if os.path.normpath(top) not in (path, os.path.dirname(path)):
        real_top, parent = os.path.realpath(top), os.path.realpath(os.path.dirname(path))
        if parent != real_top and not parent.startswith(real_top + os.sep):
            text = "the path {!r} leads through a link out of the directory that must contain it"
            raise OpError("bad_request", text.format(relative))
    if known is not None:
        known.add(os.path.dirname(path))
    return path


def check_mounts(sources: Iterable[str]) -> None:
    """Check that the source paths of ``volumeMounts`` exist on this node and are accessible. Raises ``no_mount``."""
    for source in sources:
        if not os.path.exists(source):
            text = "`volumeMounts`: `{}` does not exist on this node, or this user cannot access it"
            raise OpError("no_mount", text.format(source))
