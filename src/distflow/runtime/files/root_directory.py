"""The private directory of distflow in a node's configured directory, and the markers of directories that distflow created.

The configured directory (``root`` in the configuration) may contain the user's own data. So distflow keeps its files there in
one private directory. ``bootstrap.STUB`` creates and checks the private directory before it imports modules from it. In the
code of services, the argument ``root`` is the private directory. The private directory and each workflow's directory in it
contain a marker file. A workflow's directory is removed only if it has a marker, or if the records of an attempt prove that
distflow created it.

Earlier versions kept workflows and blobs directly in the configured directory. Such workflows are still used if their records
prove that distflow created them. Their directories are not moved, because running tasks and recorded outputs refer to them.
Blobs are moved to the private directory when they are needed (``blobs.path_of``).
"""

from __future__ import annotations

import contextlib
import os
import stat

from distflow.protocol.light_typing import List, Optional

__all__ = ["MARKER", "MARKER_TEXT", "PRIVATE", "earlier_root", "is_marked", "is_own_directory", "mark", "roots"]

PRIVATE = "distflow-node"
MARKER = ".distflow"
MARKER_TEXT = (
    "distflow node directory 1\n"
    "`distflow node clean` and `distflow node uninstall` remove files in this directory. Do not keep your own files in it.\n"
)
_SIGNATURE = MARKER_TEXT.split("\n", 1)[0].encode() + b"\n"


def earlier_root(root: str) -> Optional[str]:
    """Return the configured directory, where earlier versions kept their files; None if ``root`` is not a private directory."""
    return os.path.dirname(root) if os.path.basename(root) == PRIVATE else None


def roots(root: str) -> List[str]:
    """Return the private directory ``root`` and, after it, the configured directory, which earlier versions used."""
    earlier = earlier_root(root)
    return [root] if earlier is None else [root, earlier]


def is_own_directory(path: str) -> bool:
    """Return whether ``path`` is a directory of this user, and not a link to one."""
    try:
        info = os.lstat(path)
    except OSError:
        return False
    return stat.S_ISDIR(info.st_mode) and info.st_uid == os.getuid()


def is_marked(directory: str) -> bool:
    """Return whether ``directory`` contains a marker file of distflow that belongs to this user."""
    try:
        fd = os.open(os.path.join(directory, MARKER), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        info = os.fstat(fd)
        is_regular = stat.S_ISREG(info.st_mode) and info.st_uid == os.getuid()
        return is_regular and os.read(fd, len(_SIGNATURE)) == _SIGNATURE
    except OSError:
        return False
    finally:
        os.close(fd)


def mark(directory: str) -> None:
    """Create the marker file in ``directory``, unless it has a valid one."""
    if is_marked(directory):
        return
    new = os.path.join(directory, "{}.{}".format(MARKER, os.getpid()))
    fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(MARKER_TEXT.encode())
        os.rename(new, os.path.join(directory, MARKER))
    except OSError:  # for example, the disk is full
        with contextlib.suppress(OSError):
            os.unlink(new)
        raise
