"""A limit on the memory of a task's processes, checked from outside. It needs only /proc and no privileges.

It counts the memory that would be free without the processes: their resident memory, with shared pages counted once (``Pss`` of
proc(5)). Reading that is expensive, so it happens only when the plain sum is above the limit. A limit of the address space
(``ulimit -v``) would not work: CUDA reserves far more addresses than it uses.
"""

from __future__ import annotations

import os
import re
import time
from typing import List, Optional, Set

from distflow.runtime.processes import list_processes, only_descendants

__all__ = ["MemoryLimit", "size_text"]

_INTERVAL_S = 1.0
_INVERSE_SHARE = 50
"""Checks take at most one part in this number of the time."""
_PAGE = os.sysconf("SC_PAGE_SIZE")
_PSS = re.compile(rb"^Pss:\s+([0-9]+) kB", re.MULTILINE)
_UNITS = ("KiB", "MiB", "GiB", "TiB")


class MemoryLimit:
    """A limit of ``limit`` bytes for all descendants of the process ``root``."""

    def __init__(self, limit: int, root: int) -> None:
        self._limit = limit
        self._root = root
        self.due_at = time.monotonic() + _INTERVAL_S
        """Time of the next check, on the monotonic clock."""

    def check(self) -> Optional[str]:
        """Check the processes. Returns a message if they use more than the limit, else None."""
        began = time.monotonic()
        found = self._measure()
        self.due_at = time.monotonic() + max(_INTERVAL_S, _INVERSE_SHARE * (time.monotonic() - began))
        return found

    def _measure(self) -> Optional[str]:
        pids = _below(self._root)
        if sum(_resident(pid) for pid in pids) <= self._limit:
            return None
        sizes = {pid: _own_share(pid) for pid in pids}
        used = sum(sizes.values())
        if used <= self._limit:
            return None
        largest = max(sizes, key=lambda pid: sizes[pid])
        name, limit = "{} (pid {})".format(_name(largest), largest), size_text(self._limit)
        if len(pids) == 1:
            return "its process {} uses {} of memory, and it asked for {}".format(name, size_text(used), limit)
        text = "its {} processes use {} of memory, and it asked for {}; the largest is {} with {}"
        return text.format(len(pids), size_text(used), limit, name, size_text(sizes[largest]))


def size_text(size: int) -> str:
    """Format a number of bytes for people, such as ``1.5 GiB``."""
    value, unit = size / 1024, 0
    while value >= 1024 and unit + 1 < len(_UNITS):
        value, unit = value / 1024, unit + 1
    return "{:.4g} {}".format(value, _UNITS[unit])


def _below(root: int) -> List[int]:
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
            return int(file.read(256).split()[1]) * _PAGE
    except (OSError, IndexError):
        return 0


def _own_share(pid: int) -> int:
    """Return the resident bytes with shared pages counted in part, or in full if the kernel does not report the parts."""
    try:
        with open("/proc/{}/smaps_rollup".format(pid), "rb") as file:
            match = _PSS.search(file.read())
    except OSError:
        match = None
    return _resident(pid) if match is None else int(match.group(1)) * 1024


def _name(pid: int) -> str:
    try:
        with open("/proc/{}/comm".format(pid), encoding="utf-8", errors="replace") as file:
            return file.read().strip()
    except OSError:
        return "one that has ended"
