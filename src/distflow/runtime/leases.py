"""Leases of a node's GPUs and ports: file locks that vanish with the processes that hold them.

The lock files lie in a directory that all users of the machine share (mode 1777), so nothing in it is trusted: a name may be a
link, a FIFO or somebody's private file.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import stat
from typing import List, NamedTuple, Optional, Sequence, Tuple, Union

from distflow.runtime.wire import Json, OpError

__all__ = ["Held", "take"]

_ATTEMPTS_AT_ANY_PORT = 200


class Held(NamedTuple):
    """A lease as descriptors: it ends when the last copy of them is closed."""

    gpu_ids: List[int]
    port: Optional[int]
    locks: List[int]
    port_sockets: List[int]

    def close(self) -> None:
        """Close this process's copies."""
        for fd in self.locks + self.port_sockets:
            os.close(fd)


def take(lease_dir: str, gpus: int, gpu_ids: Sequence[int], port: Union[str, int, None], holder: Json) -> Held:
    """Take ``gpus`` of ``gpu_ids`` and ``port`` (a number, ``"any"`` or None): all of it, or ``OpError`` and nothing."""
    held = Held([], None, [], [])
    if not gpus and port is None:
        return held
    if not lease_dir:
        raise OpError("bad_request", "`lease_dir` is needed for GPUs and ports")
    directory = _open_directory(lease_dir)
    try:
        _take_gpus(directory, gpus, gpu_ids, holder, held)
        if port is not None:
            number, lock, sockets = _take_port(directory, port, holder)
            held = held._replace(port=number, locks=held.locks + [lock], port_sockets=sockets)
    except BaseException:
        held.close()
        raise
    finally:
        os.close(directory)
    return held


def _open_directory(path: str) -> int:
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
        return os.open(path, flags)
    except OSError as error:
        raise OpError.from_os(error, "the lease directory {} cannot be used".format(path)) from error


def _open_lock(directory: int, name: str) -> int:
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


def _lock(directory: int, name: str, holder: Json) -> Tuple[int, str]:
    """Lock ``name``: its descriptor, or -1 and who holds it."""
    while True:
        try:
            fd = _open_lock(directory, name)
        except OSError as error:
            return -1, "{}: {}".format(name, error.strerror)
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                os.close(fd)
                return -1, "{} is no regular file".format(name)
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            who = _read_holder(fd)
            os.close(fd)
            return -1, who
        except OSError as error:
            os.close(fd)
            return -1, "{}: {}".format(name, error.strerror)
        try:
            now_there = os.stat(name, dir_fd=directory, follow_symlinks=False)
        except FileNotFoundError:
            now_there = None
        if now_there is not None and now_there.st_ino == os.fstat(fd).st_ino:
            break
        os.close(fd)  # it was removed while we opened it: a lock on a file without a name keeps nobody out
    try:
        os.ftruncate(fd, 0)
        os.pwrite(fd, json.dumps(holder).encode(), 0)
    except OSError:
        pass  # no right to write, or no room: the lock is what counts
    return fd, ""


def _read_holder(fd: int) -> str:
    try:
        holder = json.loads(os.pread(fd, 4096, 0).decode())
        return "{user} (attempt {attempt}, pid {pid})".format(**holder)
    except (OSError, ValueError, KeyError, TypeError, IndexError):
        return "somebody unknown"


def _take_gpus(directory: int, gpus: int, gpu_ids: Sequence[int], holder: Json, held: Held) -> None:
    others: List[str] = []
    for gpu in gpu_ids:
        if len(held.gpu_ids) == gpus:
            return
        fd, who = _lock(directory, "gpu-{}.lock".format(int(gpu)), holder)
        if fd >= 0:
            held.gpu_ids.append(gpu)
            held.locks.append(fd)
        else:
            others.append("GPU {} is held by {}".format(gpu, who))
    if len(held.gpu_ids) < gpus:
        having = "{} of its {} GPUs are free, {} were asked for".format(len(held.gpu_ids), len(gpu_ids), gpus)
        raise OpError("busy", "; ".join([having] + others))


def _take_port(directory: int, port: Union[str, int], holder: Json) -> Tuple[int, int, List[int]]:
    if port == "any":
        for _ in range(_ATTEMPTS_AT_ANY_PORT):
            try:
                sockets = _bind(0)
            except OSError as error:
                if error.errno == errno.EADDRINUSE:
                    continue  # free for IPv4 only
                raise OpError.from_os(error, "no port can be had") from error
            number = _number_of(sockets[0])
            lock, _ = _lock(directory, "port-{}.lock".format(number), holder)
            if lock >= 0:
                return number, lock, sockets
            for fd in sockets:
                os.close(fd)
        raise OpError("port_taken", "no free port was found")
    number = int(port)
    lock, who = _lock(directory, "port-{}.lock".format(number), holder)
    if lock < 0:
        raise OpError("port_taken", "port {} is held by {}".format(number, who))
    try:
        return number, lock, _bind(number)
    except (OSError, OverflowError) as error:
        os.close(lock)
        if isinstance(error, OSError) and error.errno != errno.EADDRINUSE:
            raise OpError.from_os(error, "port {} cannot be used".format(number)) from error
        raise OpError("port_taken", "port {} is in use by another program (see `ss -tlnp`)".format(number)) from error


def _number_of(fd: int) -> int:
    with socket.socket(fileno=os.dup(fd)) as bound:
        return int(bound.getsockname()[1])


def _bind(port: int) -> List[int]:
    """Keep ``port``: bound with SO_REUSEADDR and never listening. torch's stores may join it; no ``bind(0)`` is handed it."""
    bound: List[int] = []
    try:
        for family, address in ((socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::")):
            try:
                one = socket.socket(family, socket.SOCK_STREAM)
            except OSError:
                if family == socket.AF_INET:
                    raise
                break  # no IPv6 here
            bound.append(one.detach())
            with socket.socket(fileno=os.dup(bound[-1])) as same:
                same.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6:
                    same.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                try:
                    same.bind((address, port))
                except OSError as error:
                    if family == socket.AF_INET6 and error.errno == errno.EADDRNOTAVAIL:
                        os.close(bound.pop())
                        break  # IPv6 is compiled in and switched off
                    raise
            port = port or _number_of(bound[0])
        return bound
    except OSError:
        for fd in bound:
            os.close(fd)
        raise
