"""Lock files in a directory that all users of the machine share (mode 1777), with descriptions of the leases' holders.

The directory is not trusted: a name may be a link, a FIFO or another user's private file, and a file may contain anything.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import stat
import time

from distflow.protocol.light_typing import Dict, List, NamedTuple, Optional, Sequence, Tuple
from distflow.runtime import processes
from distflow.runtime.files.safe_files import has_name
from distflow.runtime.probes.facts import user_name
from distflow.runtime.untrusted import decode_object
from distflow.runtime.wire import Json, OpError

__all__ = [
    "FileLock",
    "amount_of",
    "foreign_owner",
    "holder_name",
    "in_use",
    "label_of",
    "lease_directory_id",
    "lock",
    "open_directory",
    "open_lock",
    "ranges_text",
    "read_held",
    "read_holder",
    "write_holder",
]


_MOST_BYTES = 4096
_LOCK_TRIES = 100
_LOCK_RETRY_S = 0.001
"""The time between two tries. A process that only checks a lock holds it for microseconds."""


class FileLock(NamedTuple):
    """The descriptor of a locked file. If it could not be locked, ``fd`` is -1, and ``holder`` or ``error`` says why."""

    fd: int = -1
    holder: str = ""
    error: str = ""


def open_directory(path: str) -> int:
    """Open the directory, and create it if necessary. Raises ``OpError``."""
    path = os.path.abspath(os.path.expanduser(path))
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
    try:
        if not os.path.isdir(path):
            os.makedirs(os.path.dirname(path), mode=0o755, exist_ok=True)
            try:
                os.mkdir(path)
                os.chmod(path, 0o1777)  # for all users; mkdir's mode is reduced by the umask
            except FileExistsError:
                pass
        # In a world-writable directory, a link may be a trap. Elsewhere it is the administrator's choice.
        if os.stat(os.path.dirname(path)).st_mode & stat.S_IWOTH:
            flags |= os.O_NOFOLLOW
        directory = os.open(path, flags)
    except OSError as error:
        if flags & os.O_NOFOLLOW and os.path.islink(path):
            text = (
                "the lease directory `{}` is a link in a directory that all users may write to; set `lease_dir` to its target"
            )
            raise OpError("permission", text.format(path)) from error
        raise OpError.from_os(error, "cannot use the lease directory `{}`".format(path)) from error
    try:
        _refuse_open_to_all(directory, path)
    except BaseException:
        os.close(directory)
        raise
    return directory


def _refuse_open_to_all(directory: int, path: str) -> None:
    """Refuse a directory in which every user may remove other users' lock files, or set the sticky bit if it is this user's."""
    info = os.fstat(directory)
    if not info.st_mode & stat.S_IWOTH or info.st_mode & stat.S_ISVTX:
        return
    if info.st_uid == os.getuid():
        os.fchmod(directory, stat.S_IMODE(info.st_mode) | stat.S_ISVTX)
        return
    text = (
        "the lease directory `{}` is writable for all users (mode {:o}) and has no sticky bit, so that any user could "
        "remove leases; ask {} to run `chmod +t {}`, or set another `lease_dir`"
    )
    raise OpError("permission", text.format(path, stat.S_IMODE(info.st_mode), user_name(info.st_uid), path))


def foreign_owner(path: str) -> str:
    """Return the owner of the lease directory, who may remove its files; empty if the owner is root, this user or unknown."""
    try:
        owner = os.stat(os.path.expanduser(path)).st_uid
    except OSError:
        return ""
    return "" if owner in (0, os.getuid()) else user_name(owner)


def open_lock(directory: int, name: str) -> int:
    """Open or create a lock file, which may be another user's. fs.protected_regular forbids O_CREAT for such a file."""
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
            remedy = "ask its owner to run `chmod 666` on it, or set another `lease_dir`"
            raise PermissionError(errno.EACCES, "this user may neither read nor write the lock file; " + remedy, name)
        try:
            fd = os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | flags, 0o666, dir_fd=directory)
        except FileExistsError:
            continue
        os.fchmod(fd, 0o666)
        return fd
    remedy = "find the program that cleans the lease directory, or set another `lease_dir`"
    raise FileNotFoundError(errno.ENOENT, "other processes repeatedly create and remove this lock file; " + remedy, name)


def lock(directory: int, name: str, holder: Json) -> FileLock:
    """Lock the file ``name``, and write ``holder`` into it. A failure is reported in the result."""
    while True:
        try:
            fd = open_lock(directory, name)
        except OSError as error:
            return FileLock(error="{}: {}".format(name, error.strerror))
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                os.close(fd)
                return FileLock(error="{} is not a regular file".format(name))
            _flock(fd)
        except BlockingIOError:
            who = holder_name(read_holder(fd), holder.get("attempt"))
            os.close(fd)
            return FileLock(holder=who)
        except OSError as error:
            os.close(fd)
            return FileLock(error="{}: {}".format(name, error.strerror))
        if has_name(fd, name, directory):
            break
        os.close(fd)  # the file was removed after it was opened
    write_holder(fd, holder)
    return FileLock(fd)


def write_holder(fd: int, holder: Json) -> None:
    """Write the holder into a lock file. A file with a second hard link may belong to any user, so it is not changed."""
    try:
        if os.fstat(fd).st_nlink > 1:
            return
        text = json.dumps(holder).encode()
        # Overwrite first and truncate afterwards, so that readers never find an empty file.
        os.pwrite(fd, text.ljust(len(os.pread(fd, _MOST_BYTES, 0))), 0)
        os.ftruncate(fd, len(text))
    except OSError:
        pass  # no write permission, or a full disk: only the lock matters


def read_holder(fd: int) -> Optional[Json]:
    """Return the record in a lock file, which another user may have written; None if it is not a JSON object."""
    try:
        record: Json = decode_object(os.pread(fd, _MOST_BYTES, 0))
    except (OSError, ValueError):
        return None
    return record


def _flock(fd: int) -> None:
    """Lock a file. Wait for readers (``read_held``). Raises ``BlockingIOError`` if it has a holder, else ``OSError``."""
    for _ in range(_LOCK_TRIES):
        try:
            return fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            # succeeds unless the file has a holder, because readers share the lock
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            fcntl.flock(fd, fcntl.LOCK_UN)
            time.sleep(_LOCK_RETRY_S)  # noqa: TID251  flock has no time limit
    raise OSError(errno.EBUSY, "other processes lock it for reading; `lslocks` shows which")


def read_held(directory: int, name: str) -> Optional[Json]:
    """Return the record of a held lock file; None if the file is not held or not accessible.

    Another user may have written anything, so an invalid record becomes an empty one. The check takes a shared lock for an
    instant. A process that locks the file at the same time waits for the release.
    """
    try:
        fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=directory)
    except OSError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return None
    except BlockingIOError:
        return read_holder(fd) or {}
    except OSError:
        return None
    finally:
        os.close(fd)


def amount_of(value: object) -> int:
    """Return an untrusted amount if it is a positive integer, or 0."""
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0


_LABEL = r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}/[A-Za-z0-9][A-Za-z0-9_.-]{0,99}"
_USER = r"[A-Za-z0-9_][A-Za-z0-9_.@+-]{0,63}"


def holder_name(record: Optional[Json], attempt: object) -> str:
    """Return the name of a lease's holder: ``spin-1/worker (alice)``, or ``alice``.

    ``attempt`` is the attempt that requests a lease. Tasks of its own group are described as such.
    """
    record = record or {}
    holder, requester = str(record.get("attempt") or "").split("/"), str(attempt or "").split("/")
    if len(holder) == len(requester) == 4 and holder[:2] == requester[:2]:
        if holder[3] != requester[3]:
            return "an earlier attempt of this group, which is ending"
        return "this group's own task {}".format(holder[2][:100])
    user, label = str(record.get("user") or ""), label_of(record)
    user = user if re.fullmatch(_USER, user) else "an unknown user"
    return "{} ({})".format(label, user) if label else user


def label_of(record: Json) -> str:
    """Return the workflow and task that hold a lease, such as ``spin-1/worker``; empty if the lock file does not name them."""
    label = str(record.get("label") or "")
    return label if re.fullmatch(_LABEL, label) else ""


def ranges_text(numbers: Sequence[int]) -> str:
    """Return numbers as ranges.

    >>> ranges_text([3, 0, 1, 2, 7])
    '0-3, 7'
    """
    ranges: List[Tuple[int, int]] = []
    for number in sorted(set(numbers)):
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1] = (ranges[-1][0], number)
        else:
            ranges.append((number, number))
    return ", ".join(str(first) if first == last else "{}-{}".format(first, last) for first, last in ranges)


def in_use(holders: Sequence[Tuple[int, str]]) -> str:
    """Describe GPUs in use on one line: ``GPUs 0-1 by spin-1/w1 (root), GPU 3 by pid 7 (bob, python), …``."""
    by_name: Dict[str, List[int]] = {}
    for gpu, name in holders:
        by_name.setdefault(name, []).append(gpu)
    return ", ".join("GPU{} {} by {}".format("s" * (len(gpus) > 1), ranges_text(gpus), name) for name, gpus in by_name.items())


_NETWORK = ("nfs", "cifs", "smb", "lustre", "gpfs", "beegfs", "ceph", "fuse.sshfs", "fuse.glusterfs", "9p", "afs")


def lease_directory_id(lease_dir: str) -> str:
    """Return an id of the lease directory, which does not depend on its path; empty if the directory cannot be used.

    Creates the directory if necessary.
    Two nodes of a pool with the same id are the same machine, or share the directory over the network.
    """
    if not lease_dir:
        return ""
    try:
        directory = open_directory(lease_dir)
    except OpError:
        return ""
    try:
        info = os.fstat(directory)
    finally:
        os.close(directory)
    source = _network_source("{}:{}".format(os.major(info.st_dev), os.minor(info.st_dev)))
    if source:
        return "network {} {}".format(source, info.st_ino)
    return "machine {} {} {} {}".format(_machine_id(), processes.boot_id(), info.st_dev, info.st_ino)


def _machine_id() -> str:
    try:
        with open("/etc/machine-id", encoding="utf-8", errors="replace") as file:
            return file.read(64).strip()
    except OSError:
        return ""


def _network_source(device: str) -> str:
    """Return a network file system's source (``server:/export``) by its device number; empty for any other file system."""
    try:
        with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as file:
            lines = file.read().split("\n")
    except OSError:
        return ""
    for line in lines:
        before, _, after = line.partition(" - ")
        words, described = before.split(" "), after.split(" ")
        if len(words) > 2 and words[2] == device and len(described) > 1 and described[0].startswith(_NETWORK):
            return described[1]
    return ""
