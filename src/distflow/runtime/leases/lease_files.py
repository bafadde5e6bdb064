"""Lock files in a directory that all users of the machine share (mode 1777).

Its contents are not trusted: a name may be a link, a FIFO or another user's private file.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import stat
import time
from typing import Optional, Tuple

from distflow.runtime.files.durable import is_named
from distflow.runtime.leases.holder_names import holder_name
from distflow.runtime.probes.facts import user_name
from distflow.runtime.untrusted import decode_object
from distflow.runtime.wire import Json, OpError

__all__ = ["foreign_owner", "lock", "open_directory", "open_lock", "read", "said_of", "sign"]

_MOST_BYTES = 4096
_LOOKS = 100
_LOOK_S = 0.001
"""Checking a lock takes microseconds."""


def open_directory(path: str) -> int:
    """Open the directory, and create it if necessary. Raises ``OpError``."""
    path = os.path.abspath(os.path.expanduser(path))
    try:
        if not os.path.isdir(path):
            os.makedirs(os.path.dirname(path), mode=0o755, exist_ok=True)
            try:
                os.mkdir(path)
                os.chmod(path, 0o1777)  # for all users; mkdir's mode is reduced by the umask
            except FileExistsError:
                pass
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
        # In a world-writable directory, a link may be a trap. Elsewhere it is the administrator's choice.
        if os.stat(os.path.dirname(path)).st_mode & stat.S_IWOTH:
            flags |= os.O_NOFOLLOW
        directory = os.open(path, flags)
    except OSError as error:
        raise OpError.from_os(error, "the lease directory {} cannot be used".format(path)) from error
    try:
        _refuse_open_to_all(directory, path)
    except BaseException:
        os.close(directory)
        raise
    return directory


def _refuse_open_to_all(directory: int, path: str) -> None:
    """Refuse a directory in which every user may remove the lock files of others: leases would have no effect."""
    info = os.fstat(directory)
    if not info.st_mode & stat.S_IWOTH or info.st_mode & stat.S_ISVTX:
        return
    if info.st_uid == os.getuid():
        os.fchmod(directory, stat.S_IMODE(info.st_mode) | stat.S_ISVTX)
        return
    said = (
        "the lease directory {} may be written to by all users (mode {:o}) and lacks the sticky bit, so that anybody could "
        "remove leases; let {} run `chmod +t {}`, or set another `lease_dir`"
    )
    raise OpError("permission", said.format(path, stat.S_IMODE(info.st_mode), user_name(info.st_uid), path))


def foreign_owner(path: str) -> str:
    """Return the owner of the lease directory, who may remove its files, unless that is root or this user; else empty."""
    try:
        owner = os.stat(os.path.expanduser(path)).st_uid
    except OSError:
        return ""
    return "" if owner in (0, os.getuid()) else user_name(owner)


def open_lock(directory: int, name: str) -> int:
    """Open a lock file that may be another user's. fs.protected_regular forbids O_CREAT on an existing one."""
    flags = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    for _ in range(10):
        for access in (os.O_RDWR, os.O_RDONLY):  # flock needs no write permission
            try:
                return os.open(name, access | flags, dir_fd=directory)
            except PermissionError:
                continue
            except FileNotFoundError:
                break
        else:
            raise PermissionError(errno.EACCES, "it is closed to this user", name)
        try:
            fd = os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | flags, 0o666, dir_fd=directory)
        except FileExistsError:
            continue
        os.fchmod(fd, 0o666)
        return fd
    raise FileNotFoundError(errno.ENOENT, "it comes and goes", name)


def lock(directory: int, name: str, holder: Json) -> Tuple[int, str]:
    """Lock ``name``. Returns the descriptor and an empty string, or -1 and the name of the holder."""
    while True:
        try:
            fd = open_lock(directory, name)
        except OSError as error:
            return -1, "{}: {}".format(name, error.strerror)
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                os.close(fd)
                return -1, "{} is not a regular file".format(name)
            _flock(fd)
        except BlockingIOError:
            who = holder_name(read(fd), holder.get("attempt"))
            os.close(fd)
            return -1, who
        except OSError as error:
            os.close(fd)
            return -1, "{}: {}".format(name, error.strerror)
        if is_named(fd, name, directory):
            break
        os.close(fd)  # it was removed after we opened it
    sign(fd, holder)
    return fd, ""


def sign(fd: int, holder: Json) -> None:
    """Write the holder into a lock file. A file with a second name (a hard link) may be anyone's, so it is not changed."""
    try:
        if os.fstat(fd).st_nlink > 1:
            return
        text = json.dumps(holder).encode()
        # Overwritten first and truncated then, so that readers never find an empty file.
        os.pwrite(fd, text.ljust(len(os.pread(fd, _MOST_BYTES, 0))), 0)
        os.ftruncate(fd, len(text))
    except OSError:
        pass  # no write permission, or a full disk: only the lock matters


def read(fd: int) -> Optional[Json]:
    """Return the record in a lock file; None if there is none.

    Another user may have written anything into it, within bounds.
    """
    try:
        said: Json = decode_object(os.pread(fd, _MOST_BYTES, 0))
    except (OSError, ValueError):
        return None
    return said


def _flock(fd: int) -> None:
    """Lock a file. Raises ``BlockingIOError`` if it is held. Shared locks of readers (``said_of``) are waited for."""
    for _ in range(_LOOKS):
        try:
            return fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            # succeeds unless the file has a holder, because readers share the lock
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            fcntl.flock(fd, fcntl.LOCK_UN)
            time.sleep(_LOOK_S)  # noqa: TID251  flock knows no time limit
    raise BlockingIOError(errno.EWOULDBLOCK, "other processes keep checking it")


def said_of(directory: int, name: str) -> Optional[Json]:
    """Return the record of a held lock file; None if the file is not held or not accessible.

    Another user may have written anything; an invalid record becomes an empty one. The check takes the lock as shared for an
    instant, and a concurrent locker waits that long.
    """
    try:
        fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=directory)
    except OSError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return None
    except BlockingIOError:
        return read(fd) or {}
    except OSError:
        return None
    finally:
        os.close(fd)
