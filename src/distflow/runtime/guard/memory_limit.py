"""The memory that a task's processes may use, watched from beside them: nothing but /proc is needed, and no right.

What counts is what would be free without them: their resident memory, where a page that several share counts once
(``Pss`` of proc(5)). That is dear to read, so it is asked for only when their plain sum is above the limit. A limit of
addresses (``ulimit -v``) would not do: CUDA reserves far more of them than it ever fills.
"""

from __future__ import annotations

import os
import re
import time
from typing import List, Optional, Set

from distflow.runtime.processes import list_processes, only_descendants

__all__ = ["MemoryLimit", "size_text"]

_EVERY_S = 1.0
_SHARE = 50
"""A look may take this part of the time between two."""
_PAGE = os.sysconf("SC_PAGE_SIZE")
_PSS = re.compile(rb"^Pss:\s+([0-9]+) kB", re.MULTILINE)
_UNITS = ("KiB", "MiB", "GiB", "TiB")


class MemoryLimit:
    """``limit`` bytes for everything below the process ``root``."""

    def __init__(self, limit: int, root: int) -> None:
        self._limit = limit
        self._root = root
        self.due_at = time.monotonic() + _EVERY_S
        """When to look next, on the monotonic clock."""

    def check(self) -> Optional[str]:
        """Look now. Returns what to say when they use more than they may, and None otherwise."""
        began = time.monotonic()
        found = self._look()
        self.due_at = time.monotonic() + max(_EVERY_S, _SHARE * (time.monotonic() - began))
        return found

    def _look(self) -> Optional[str]:
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
        said = "its {} processes use {} of memory, and it asked for {}; the largest is {} with {}"
        return said.format(len(pids), size_text(used), limit, name, size_text(sizes[largest]))


def size_text(size: int) -> str:
    """A number of bytes for people, such as ``1.5 GiB``."""
    value, unit = size / 1024, 0
    while value >= 1024 and unit + 1 < len(_UNITS):
        value, unit = value / 1024, unit + 1
    return "{:.4g} {}".format(value, _UNITS[unit])


def _below(root: int) -> List[int]:
    """The descendants of a process. Kernels without ``children`` files (CONFIG_PROC_CHILDREN) have all of /proc read."""
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
    """The children of all threads of a process; none of one that is gone; None where the kernel does not tell."""
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
    """Resident bytes where a shared page counts in part; all of them where the kernel does not tell."""
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
