"""Killing a tree of processes whatever its members do: stop all visible ones, kill them, and repeat until none is left.

The killing process is a child subreaper, so everything in the tree stays below it: a daemon whose parents have died becomes its
child. The hard case is a chain of daemons that fork and exit at once: when a listing of /proc is complete, every id in it is
old. Such a chain is pursued through the ids that the kernel assigned last, and killed within some ten microseconds. (Measured
on 2 cores with a load of 22: listings alone had not caught two chains after minutes; the pursuit took 0.5 s.)
"""

from __future__ import annotations

import os
import signal
import time
from typing import Callable, Dict, Iterable, List, Set, Tuple

from distflow.runtime.processes import Process, last_pid, list_processes, read_process

__all__ = ["TreeKiller"]

_PASSES = 6
_PURSUIT_S = 0.02
_WINDOW = 12
_MAX_WINDOW = 256
_LONG_PAUSE_S = 0.2
_UNTOUCHABLE_S = 5.0


class TreeKiller:
    """Kills every process that ``find`` selects from the list of all and that ``owns`` accepts. The two must agree.

    Call ``step`` repeatedly, and reap in between, until no process is left or ``is_over``. Signals go to the process and to its
    process group: the kernel delivers them to a group atomically, so no member can escape by forking.
    """

    def __init__(self, find: Callable[[List[Process]], List[Process]], owns: Callable[[Process], bool]) -> None:
        self._find = find
        self._owns = owns
        self._own_group = os.getpgrp()
        self._last_seen: Set[Tuple[int, int]] = set()
        self._repeats = 0
        # processes of other users (started by `sudo`), which cannot be signaled: id and start time
        self._untouchable: Dict[int, int] = {}
        self._untouchable_since = 0.0
        self.message = ""
        """Message about processes that could not be killed."""

    @property
    def pause_s(self) -> float:
        """Seconds until the next step: short, unless the same processes remain for long.

        A process that hangs in a driver dies only when the driver lets it.
        """
        return 0.002 if self._repeats < 200 else _LONG_PAUSE_S

    @property
    def is_over(self) -> bool:
        """Whether only processes of other users, which cannot be signaled, have remained for some seconds."""
        if not self._untouchable_since or time.monotonic() - self._untouchable_since < _UNTOUCHABLE_S:
            return False
        ids = ", ".join(str(pid) for pid in sorted(self._untouchable))
        self.message = "processes of another user are left, which this user may not stop: {}".format(ids)
        return True

    def find(self) -> List[Process]:
        """Return the selected processes that are alive."""
        return [process for process in self._find(list(list_processes())) if process.is_alive]

    def step(self) -> bool:
        """Stop all processes, repeat until no new one appears, kill them, and pursue faster ones. True if there was any."""
        seen: Dict[Tuple[int, int], Process] = {}
        self._untouchable.clear()
        for _ in range(_PASSES):
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
        """Kill each new process of the tree for some milliseconds. Returns how many were killed."""
        killed: Set[Tuple[int, int]] = set()
        until = time.monotonic() + _PURSUIT_S
        before = last_pid()
        while time.monotonic() < until:
            last = last_pid()
            # Check the ids that were assigned since the last check, and some before: an id is assigned slightly before its
            # process is visible. When the ids wrap around, the last few before that are missed once.
            count = max(_WINDOW, min(_MAX_WINDOW, last - before))
            before = last
            for pid in range(last, max(1, last - count), -1):
                process = read_process(pid)
                if process is not None and process.is_alive and self._owns(process):
                    self.signal([process], signal.SIGKILL)
                    killed.add((process.pid, process.start))
        return len(killed)
