"""Lock files in a directory that all users of the machine share (mode 1777).

Nothing in it is trusted: a name may be a link, a FIFO or somebody's private file.
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
"""Looking takes microseconds."""


def open_directory(path: str) -> int:
    """Open the directory, making it when it is not there. Raises ``OpError``."""
    path = os.path.abspath(os.path.expanduser(path))
    try:
        if not os.path.isdir(path):
            os.makedirs(os.path.dirname(path), mode=0o755, exist_ok=True)
            try:
                os.mkdir(path)
                os.chmod(path, 0o1777)  # for all users: a umask would have narrowed it
            except FileExistsError:
                pass
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
        # In a directory where everybody may write, a link is somebody's trap; elsewhere it is the administrator's choice.
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
    """Refuse a directory in which every user may remove the lock files of others: a lease would keep nobody out."""
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
    """The name of another user than root who owns the lease directory, and so may remove what lies in it; empty without one."""
    try:
        owner = os.stat(os.path.expanduser(path)).st_uid
    except OSError:
        return ""
    return "" if owner in (0, os.getuid()) else user_name(owner)


def open_lock(directory: int, name: str) -> int:
    """Open a lock file that may be another user's: O_CREAT on an existing one is what fs.protected_regular forbids."""
    flags = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    for _ in range(10):
        for access in (os.O_RDWR, os.O_RDONLY):  # flock asks for no right to write
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
    """Lock ``name``: its descriptor, or -1 and who holds it."""
    while True:
        try:
            fd = open_lock(directory, name)
        except OSError as error:
            return -1, "{}: {}".format(name, error.strerror)
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                os.close(fd)
                return -1, "{} is no regular file".format(name)
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
        os.close(fd)  # it was removed while we opened it
    sign(fd, holder)
    return fd, ""


def sign(fd: int, holder: Json) -> None:
    """Write into a lock file who holds it. A file with a second name (a hard link) may be anybody's: it is left as it is."""
    try:
        if os.fstat(fd).st_nlink > 1:
            return
        text = json.dumps(holder).encode()
        # Over what stands there, then cut: nobody finds nothing meanwhile.
        os.pwrite(fd, text.ljust(len(os.pread(fd, _MOST_BYTES, 0))), 0)
        os.ftruncate(fd, len(text))
    except OSError:
        pass  # no right to write, or no room: the lock is what counts


def read(fd: int) -> Optional[Json]:
    """The record in a lock file; None where there is none. It is other people's, and may say anything within bounds."""
    try:
        said: Json = decode_object(os.pread(fd, _MOST_BYTES, 0))
    except (OSError, ValueError):
        return None
    return said


def _flock(fd: int) -> None:
    """Lock it. Raises ``BlockingIOError`` when somebody holds it; who just looks at it (``said_of``) is waited for."""
    for _ in range(_LOOKS):
        try:
            return fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)  # with who looks it can be shared, and with no holder
            fcntl.flock(fd, fcntl.LOCK_UN)
            time.sleep(_LOOK_S)  # noqa: TID251  flock knows no time limit
    raise BlockingIOError(errno.EWOULDBLOCK, "it is looked at again and again")


def said_of(directory: int, name: str) -> Optional[Json]:
    """What is written in a lock file that somebody holds; None when nobody does, or nobody may look.

    It is other people's, and may say anything; what is no record is an empty one. Looking takes the lock for an instant, as
    shared: who wants it just then waits for that.
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
