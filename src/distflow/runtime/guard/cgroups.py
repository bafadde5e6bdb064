"""A cgroup (v2) for each attempt, where this user may create one.

Processes are recognized by the attempt's mark in their environment and by their session, but a daemon can lose both. It cannot
leave the cgroup unless this user's permissions allow that. Root may create cgroups, and so may users with a delegated one (in a
container, or through a user manager). For other users nothing changes. No controller is enabled, so the cgroup limits and
counts nothing.

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

__all__ = ["enclose", "end", "is_attempt_cgroup", "name_of", "of", "remove", "sweep"]

_PREFIX = "distflow-"
_TRIES = 10
_PAUSE_S = 0.01
_REMOVED_ERRORS = (errno.ENOENT, errno.ENODEV)
"""Errors when another process removed the cgroup as a leftover while it was still empty."""


def enclose(pid: int, directory: str) -> Optional[str]:
    """Move a process without children into a new cgroup for its attempt.

    Returns the cgroup's path, or None where none can be created. ``directory`` is the attempt's.
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
            if error.errno not in _REMOVED_ERRORS:
                break
    _remove(path)
    return None


def name_of(command: Json) -> str:
    """Return the name of a command's cgroup in the form that ``of`` returns, or an empty string if it has none."""
    path = command.get("cgroup")
    return os.path.basename(path) if isinstance(path, str) and is_attempt_cgroup(path) else ""


def is_attempt_cgroup(path: str) -> bool:
    """Whether a path is that of an attempt's cgroup, judged by its name."""
    return os.path.basename(path).startswith(_PREFIX)


def end(command: Json) -> None:
    """Let the kernel kill all processes in a command's cgroup at once (since Linux 5.14). Does nothing where it cannot."""
    if name_of(command):
        with contextlib.suppress(OSError), open(os.path.join(command["cgroup"], "cgroup.kill"), "w") as file:
            file.write("1")


def remove(command: Json) -> None:
    """Remove a command's cgroup when it is empty. The kernel may count a process for a moment after it was reaped."""
    if name_of(command):
        for _ in range(_TRIES):
            if _remove(command["cgroup"]):
                break
            select.select([], [], [], _PAUSE_S)


def sweep() -> None:
    """Remove empty cgroups of attempts that did not remove them. A cgroup with processes cannot be removed."""
    base = _own()
    if base is None:
        return
    with contextlib.suppress(OSError):
        for name in filter(is_attempt_cgroup, os.listdir(base)):
            _remove(os.path.join(base, name))


def _remove(path: str) -> bool:
    """Remove a cgroup. Returns False if it still contains processes."""
    try:
        os.rmdir(path)
    except OSError as error:
        return error.errno != errno.EBUSY
    return True


def of(pid: int) -> str:
    """Return the name of the attempt's cgroup that contains a process, directly or further up; empty if there is none."""
    try:
        with open("/proc/{}/cgroup".format(pid)) as file:
            lines = file.read().splitlines()
    except OSError:
        return ""
    place = next((line[3:] for line in lines if line.startswith("0::")), "")
    return next((name for name in reversed(place.split("/")) if name.startswith(_PREFIX)), "")


def _own() -> Optional[str]:
    """Return the directory of this process's cgroup; None where cgroup v2 is not mounted or not visible."""
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
