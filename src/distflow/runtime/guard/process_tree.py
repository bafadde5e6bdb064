"""The processes of an attempt: kill all of them, keep them in a cgroup, and limit their memory.

``TreeKiller`` kills a tree of processes even if its members try to escape: it suspends all visible members, kills them, and
repeats until none is left. Most callers are child subreapers, so a daemon whose parents have died becomes their child and stays
in the tree. The other callers find such daemons by the attempt's variable, session or cgroup. The hard case is a chain of
daemons that each fork and exit immediately: when a listing of /proc is complete, every process of the chain that it shows has
already exited. Such a chain is found through the ids that the kernel assigned last: one check takes tens of microseconds.
(Measured on 2 cores with a load of 22: with listings alone, two chains survived for minutes; this search killed them in 0.5 s.)

A cgroup (v2) for each attempt finds daemons that have neither the attempt's name in their environment nor its session. They
cannot leave the cgroup unless this user's permissions allow that. Root may create cgroups, and so may users with a delegated
cgroup (in a container, or through a user manager). Attempts of users without this right have no cgroup. No controller is
enabled, so the cgroup neither limits nor counts resources. Source: https://docs.kernel.org/admin-guide/cgroup-v2.html
(``cgroup.procs``, ``cgroup.kill``, delegation).

``MemoryLimit`` needs only /proc and no privileges. It counts the resident memory of the processes. A page that several
processes share is divided among them (``Pss`` of proc(5)). Reading ``Pss`` is expensive, so it is read only if the sum of their
resident memory is above the limit. A limit of the address space (``ulimit -v``) would not work: CUDA reserves far more
addresses than it uses.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import select
import signal
import time

from distflow.protocol.light_typing import Callable, Dict, Iterable, List, Optional, Set, Tuple
from distflow.runtime.hashing import sha256_hex
from distflow.runtime.processes import Process, last_pid, list_processes, name_of, only_descendants, read_process
from distflow.runtime.wire import Json

__all__ = [
    "MemoryLimit",
    "TreeKiller",
    "cgroup_name",
    "cgroup_of",
    "enclose",
    "is_attempt_cgroup",
    "kill_cgroup",
    "remove_cgroup",
    "size_text",
    "sweep_cgroups",
]


_STOP_PASSES = 6
_PURSUIT_S = 0.02
_WINDOW = 12
_MAX_WINDOW = 256
_LONG_PAUSE_S = 0.2
_UNTOUCHABLE_S = 5.0


class TreeKiller:
    """Kills a set of processes. ``find`` selects them from the list of all processes, and ``owns`` checks a single process.

    Call ``step`` repeatedly, and reap in between, until no process is left or ``is_over``. Signals are sent to the process and
    to its process group: the kernel delivers them to a group atomically, so no member can escape by forking.
    """

    def __init__(self, find: Callable[[List[Process]], List[Process]], owns: Callable[[Process], bool]) -> None:
        self._find = find
        self._owns = owns
        self._own_group = os.getpgrp()
        self._last_seen: Set[Tuple[int, int]] = set()
        self._repeats = 0
        # ids and start times of other users' processes (started by `sudo`), which cannot be signaled
        self._untouchable: Dict[int, int] = {}
        self._untouchable_since = 0.0
        self.message = ""
        """Message about processes that could not be killed."""

    @property
    def pause_s(self) -> float:
        """Seconds until the next step. The pause is longer after many steps without effect: a process may hang in a driver."""
        return 0.002 if self._repeats < 200 else _LONG_PAUSE_S

    @property
    def is_over(self) -> bool:
        """Whether only processes of other users, which cannot be signaled, have remained for some seconds. Sets ``message``."""
        if not self._untouchable_since or time.monotonic() - self._untouchable_since < _UNTOUCHABLE_S:
            return False
        ids = ", ".join(str(pid) for pid in sorted(self._untouchable))
        self.message = (
            "process {} of another user remains; only root or that user can kill it"
            if len(self._untouchable) == 1
            else "processes of other users remain ({}); only root or these users can kill them"
        ).format(ids)
        return True

    def find(self) -> List[Process]:
        """Return the selected processes that are alive."""
        return [process for process in self._find(list(list_processes())) if process.is_alive]

    def step(self) -> bool:
        """Suspend processes until no new ones appear (6 passes at most), kill them, and pursue processes that fork fast.

        Returns whether there were any processes.
        """
        seen: Dict[Tuple[int, int], Process] = {}
        self._untouchable.clear()
        for _ in range(_STOP_PASSES):
            fresh = [process for process in self.find() if (process.pid, process.start) not in seen]
            if not fresh:
                break
            self.signal(fresh, signal.SIGSTOP)
            seen.update({(process.pid, process.start): process for process in fresh})
        self.signal(seen.values(), signal.SIGKILL)
        remaining = set(seen)
        self._repeats = self._repeats + 1 if remaining and remaining == self._last_seen else 0
        self._last_seen = remaining
        if not remaining or len(self._untouchable) < len({pid for pid, _ in remaining}):
            self._untouchable_since = 0.0
        elif not self._untouchable_since:
            self._untouchable_since = time.monotonic()
        killed = self._pursue() if self._repeats == 0 else 0
        return bool(remaining or killed)

    def signal(self, processes: Iterable[Process], signum: int) -> None:
        """Send ``signum`` to processes and to their groups."""
        groups: Set[int] = set()
        for process in processes:
            try:
                os.kill(process.pid, signum)
            except PermissionError:
                self._untouchable[process.pid] = process.start
                continue
            except ProcessLookupError:
                pass
            groups.add(process.pgid)
        for group in groups:
            if group > 1 and group != self._own_group:
                try:
                    os.killpg(group, signum)
                except (PermissionError, ProcessLookupError):
                    continue

    def _pursue(self) -> int:
        """Kill new processes of the tree as they appear, for some milliseconds. Returns how many were killed."""
        killed: Set[Tuple[int, int]] = set()
        until = time.monotonic() + _PURSUIT_S
        before = last_pid()
        while time.monotonic() < until:
            last = last_pid()
            # Check the ids that were assigned since the last check, and some earlier ids: an id is assigned slightly before its
            # process is visible. When the ids start again from the lowest, the last ids before that are not checked.
            count = max(_WINDOW, min(_MAX_WINDOW, last - before))
            before = last
            for pid in range(last, max(1, last - count), -1):
                process = read_process(pid)
                if process is not None and process.is_alive and self._owns(process):
                    self.signal([process], signal.SIGKILL)
                    killed.add((process.pid, process.start))
        return len(killed)


_CGROUP_PREFIX = "distflow-"
_REMOVE_TRIES = 10
_REMOVE_PAUSE_S = 0.01
_REMOVED_ERRORS = (errno.ENOENT, errno.ENODEV)
"""Errors that mean that another process removed the new cgroup as a leftover, because it was empty."""


def enclose(pid: int, directory: str) -> Optional[str]:
    """Move a process without children into the cgroup of its attempt, which is created if necessary.

    Returns the cgroup's path, or None if that is not possible. ``directory`` is the attempt's.
    """
    base = _own_cgroup()
    if base is None:
        return None
    path = os.path.join(base, _CGROUP_PREFIX + sha256_hex(os.fsencode(os.path.realpath(directory)))[:32])
    for _ in range(_REMOVE_TRIES):
        try:
            with contextlib.suppress(FileExistsError):
                os.mkdir(path)
            with open(os.path.join(path, "cgroup.procs"), "w") as procs:
                procs.write(str(pid))
            return path
        except OSError as error:
            if error.errno not in _REMOVED_ERRORS:
                break
    _remove_empty(path)
    return None


def cgroup_name(command: Json) -> str:
    """Return the name of a command's cgroup in the form that ``cgroup_of`` returns, or an empty string if it has none."""
    path = command.get("cgroup")
    return os.path.basename(path) if isinstance(path, str) and is_attempt_cgroup(path) else ""


def is_attempt_cgroup(path: str) -> bool:
    """Return whether a path has the name of an attempt's cgroup."""
    return os.path.basename(path).startswith(_CGROUP_PREFIX)


def kill_cgroup(command: Json) -> None:
    """Let the kernel kill all processes in a command's cgroup at once. Does nothing before Linux 5.14."""
    if cgroup_name(command):
        with contextlib.suppress(OSError), open(os.path.join(command["cgroup"], "cgroup.kill"), "w") as file:
            file.write("1")


def remove_cgroup(command: Json) -> None:
    """Remove a command's cgroup if it is empty within 0.1 s. The kernel may count a process shortly after it was reaped."""
    if cgroup_name(command):
        for _ in range(_REMOVE_TRIES):
            if _remove_empty(command["cgroup"]):
                break
            select.select([], [], [], _REMOVE_PAUSE_S)


def sweep_cgroups() -> None:
    """Remove empty cgroups of attempts in this process's cgroup. The kernel refuses to remove a cgroup with processes."""
    base = _own_cgroup()
    if base is None:
        return
    with contextlib.suppress(OSError):
        for name in filter(is_attempt_cgroup, os.listdir(base)):
            _remove_empty(os.path.join(base, name))


def _remove_empty(path: str) -> bool:
    """Remove a cgroup. Returns False if it still contains processes or other cgroups."""
    try:
        os.rmdir(path)
    except OSError as error:
        return error.errno != errno.EBUSY
    return True


def cgroup_of(pid: int) -> str:
    """Return the name of the attempt's cgroup that contains a process, directly or in a nested cgroup; empty without one."""
    try:
        with open("/proc/{}/cgroup".format(pid)) as file:
            lines = file.read().splitlines()
    except OSError:
        return ""
    place = next((line[3:] for line in lines if line.startswith("0::")), "")
    return next((name for name in reversed(place.split("/")) if name.startswith(_CGROUP_PREFIX)), "")


def _own_cgroup() -> Optional[str]:
    """Return the directory of this process's cgroup; None if cgroup v2 is not mounted or not visible."""
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


_MEMORY_CHECK_S = 1.0
_INVERSE_SHARE = 50
"""The pause after a check is at least this many times the duration of the check."""
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_PSS = rb"(?m)^Pss:\s+([0-9]+) kB"
_UNITS = ("KiB", "MiB", "GiB", "TiB")


class MemoryLimit:
    """A limit of ``limit`` bytes for the total memory of all descendants of the process ``root``."""

    def __init__(self, limit: int, root: int) -> None:
        self._limit = limit
        self._root = root
        self.due_at = time.monotonic() + _MEMORY_CHECK_S
        """Time of the next check, on the monotonic clock."""

    def check(self) -> Optional[str]:
        """Check the processes. Returns a message if they use more than the limit, else None."""
        began = time.monotonic()
        found = self._measure()
        self.due_at = time.monotonic() + max(_MEMORY_CHECK_S, _INVERSE_SHARE * (time.monotonic() - began))
        return found

    def _measure(self) -> Optional[str]:
        pids = _descendants(self._root)
        if sum(_resident(pid) for pid in pids) <= self._limit:
            return None
        sizes = {pid: _own_share(pid) for pid in pids}
        used = sum(sizes.values())
        if used <= self._limit:
            return None
        largest = max(sizes, key=lambda pid: sizes[pid])
        name, limit = "{} (pid {})".format(name_of(largest) or "of unknown name", largest), size_text(self._limit)
        if len(pids) == 1:
            return "its process {} uses {} of memory, more than the {} that it requested".format(name, size_text(used), limit)
        text = "its {} processes use {} of memory, more than the {} that it requested; the largest is {} with {}"
        return text.format(len(pids), size_text(used), limit, name, size_text(sizes[largest]))


def size_text(size: int) -> str:
    """Format a number of bytes for people, such as ``1.5 GiB``."""
    value, unit = size / 1024, 0
    while value >= 1024 and unit + 1 < len(_UNITS):
        value, unit = value / 1024, unit + 1
    return "{:.4g} {}".format(value, _UNITS[unit])


def _descendants(root: int) -> List[int]:
    """Return the descendants of a process.

    All of /proc is read if the kernel has no ``children`` files (CONFIG_PROC_CHILDREN).
    """
    found: List[int] = []
    seen: Set[int] = {root}
    waiting = [root]
    while waiting:
        children = _children(waiting.pop())
        if children is None:
            return [process.pid for process in only_descendants(list_processes(), root)]
        for pid in children:
            if pid not in seen:
                seen.add(pid)
                found.append(pid)
                waiting.append(pid)
    return found


def _children(pid: int) -> Optional[List[int]]:
    """Return the children of all threads of a process: an empty list if it is gone, None if the kernel does not report them."""
    try:
        threads = os.listdir("/proc/{}/task".format(pid))
    except OSError:
        return []
    found: List[int] = []
    for thread in threads:
        try:
            with open("/proc/{}/task/{}/children".format(pid, thread), "rb", buffering=0) as file:
                found += [int(word) for word in file.read(1 << 20).split()]
        except FileNotFoundError:
            if os.path.exists("/proc/{}/task/{}/stat".format(pid, thread)):
                return None
        except OSError:
            continue
    return found


def _resident(pid: int) -> int:
    try:
        with open("/proc/{}/statm".format(pid), "rb", buffering=0) as file:
            return int(file.read(256).split()[1]) * _PAGE_BYTES
    except (OSError, IndexError):
        return 0


def _own_share(pid: int) -> int:
    """Return the resident bytes with shared pages counted in part, or in full if the kernel does not report the parts."""
    try:
        with open("/proc/{}/smaps_rollup".format(pid), "rb") as file:
            match = re.search(_PSS, file.read())
    except OSError:
        match = None
    return _resident(pid) if match is None else int(match.group(1)) * 1024
