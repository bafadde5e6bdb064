"""A cgroup (v2) for each attempt, where this user may make one: what is in it stays in it, whatever else it hides from.

Processes know their attempt by its mark in their environment and by their session, and a daemon can shed both. The cgroup
it cannot leave, unless it may write there as we may. Root has one, and who logs in with a delegated one (a container, a user
manager); for others everything is as it is without. No controller is switched on: it limits and counts nothing.

Source: https://docs.kernel.org/admin-guide/cgroup-v2.html (``cgroup.procs``, ``cgroup.kill``, delegation).
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import select
from typing import Optional

from distflow.runtime.wire import Json

__all__ = ["enclose", "end", "is_one", "name_of", "of", "remove", "sweep"]

_PREFIX = "distflow-"
_TRIES = 10
_PAUSE_S = 0.01
_SWEPT = (errno.ENOENT, errno.ENODEV)
"""Somebody has taken it for a leftover while nobody was in it yet."""


def enclose(pid: int, directory: str) -> Optional[str]:
    """Put a process, which has no children yet, into a cgroup of its attempt's own; its path, or None where none can be made.

    ``directory`` is the attempt's.
    """
    base = _own()
    if base is None:
        return None
    path = os.path.join(base, _PREFIX + hashlib.sha256(os.fsencode(os.path.realpath(directory))).hexdigest()[:32])
    for _ in range(_TRIES):
        try:
            with contextlib.suppress(FileExistsError):
                os.mkdir(path)
            with open(os.path.join(path, "cgroup.procs"), "w") as procs:
                procs.write(str(pid))
            return path
        except OSError as error:
            if error.errno not in _SWEPT:
                break
    _remove(path)
    return None


def name_of(command: Json) -> str:
    """The name of a command's cgroup, as ``of`` gives it of what is inside; empty for one without."""
    path = command.get("cgroup")
    return os.path.basename(path) if isinstance(path, str) and is_one(path) else ""


def is_one(path: str) -> bool:
    """Whether a path is that of an attempt's cgroup, as far as its name tells."""
    return os.path.basename(path).startswith(_PREFIX)


def end(command: Json) -> None:
    """Have the kernel kill everything in a command's cgroup at once (since Linux 5.14); nothing where it cannot."""
    if name_of(command):
        with contextlib.suppress(OSError), open(os.path.join(command["cgroup"], "cgroup.kill"), "w") as file:
            file.write("1")


def remove(command: Json) -> None:
    """Remove a command's cgroup when it is empty: the kernel may count a process for a moment after it was reaped."""
    if name_of(command):
        for _ in range(_TRIES):
            if _remove(command["cgroup"]):
                break
            select.select([], [], [], _PAUSE_S)


def sweep() -> None:
    """Remove the empty ones here, of attempts that nobody ended in good order; one that is in use cannot be removed."""
    base = _own()
    if base is None:
        return
    with contextlib.suppress(OSError):
        for name in filter(is_one, os.listdir(base)):
            _remove(os.path.join(base, name))


def _remove(path: str) -> bool:
    """Remove one; False when there is still somebody in it."""
    try:
        os.rmdir(path)
    except OSError as error:
        return error.errno != errno.EBUSY
    return True


def of(pid: int) -> str:
    """The name of the attempt's cgroup that a process is in, or below; empty for none."""
    try:
        with open("/proc/{}/cgroup".format(pid)) as file:
            lines = file.read().splitlines()
    except OSError:
        return ""
    place = next((line[3:] for line in lines if line.startswith("0::")), "")
    return next((name for name in reversed(place.split("/")) if name.startswith(_PREFIX)), "")


def _own() -> Optional[str]:
    """The directory of the cgroup that we are in; None where there is no cgroup v2, or none that can be seen."""
    try:
        with open("/proc/self/cgroup") as file:
            place = next((line[3:].rstrip("\n") for line in file if line.startswith("0::")), None)
        with open("/proc/self/mountinfo") as file:
            mounts = [line.split() for line in file if " - cgroup2 " in line]
    except OSError:
        return None
    if place is None or place.startswith("/.."):
        return None
    for mount in mounts:
        root, point = mount[3], mount[4]
        inside = os.path.relpath(place, root)
        path = os.path.normpath(os.path.join(point, inside))
        if not inside.startswith("..") and os.path.isdir(path):
            return path
    return None
