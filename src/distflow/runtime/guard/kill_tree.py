"""Ending a tree of processes whatever its members do: stop all that are seen, kill them, and look again until none is left.

The hunter is a child subreaper, so that everything in the tree stays below it: a daemon whose parents have died is its child.
The hard prey is a chain, daemons that fork and exit at once: when a listing of /proc has been read, each id in it is old. Such
a one is pursued by the ids that the kernel gave away last: seen and shot within some ten microseconds. (Measured on 2 cores
with a load of 22: listings alone had not caught two chains after minutes, the pursuit took 0.5 s.)
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
_MOST = 256
_REST_S = 0.2
_UNTOUCHABLE_S = 5.0


class TreeKiller:
    """Ends every process that ``find`` picks from the list of all, and that ``owns`` says yes to; the two must agree.

    ``step`` again and again, reaping in between, until nothing is left or ``is_over``. Signals go to the process and to its
    process group: the kernel delivers to a group atomically, so that none of its members forks away from it.
    """

    def __init__(self, find: Callable[[List[Process]], List[Process]], owns: Callable[[Process], bool]) -> None:
        self._find = find
        self._owns = owns
        self._own_group = os.getpgrp()
        self._prey: Set[Tuple[int, int]] = set()
        self._same = 0
        self._untouchable: Dict[int, int] = {}  # not ours to signal (what `sudo` started): id and start time
        self._untouchable_since = 0.0
        self.message = ""
        """What to say of processes that had to be left."""

    @property
    def pause_s(self) -> float:
        """How long to wait before the next step: hardly, unless the same processes are there for long.

        One that hangs in a driver dies when the driver lets it.
        """
        return 0.002 if self._same < 200 else _REST_S

    @property
    def is_over(self) -> bool:
        """Whether for some seconds nothing was left but processes of other users, which we may not signal."""
        if not self._untouchable_since or time.monotonic() - self._untouchable_since < _UNTOUCHABLE_S:
            return False
        ids = ", ".join(str(pid) for pid in sorted(self._untouchable))
        self.message = "processes of another user are left, which this user may not stop: {}".format(ids)
        return True

    def find(self) -> List[Process]:
        """What is there now and alive."""
        return [process for process in self._find(list(list_processes())) if process.is_alive]

    def step(self) -> bool:
        """Stop what is there, look again until nothing new is, kill it; then pursue what was faster. True if there was any."""
        seen: Dict[Tuple[int, int], Process] = {}
        self._untouchable.clear()
        for _ in range(_PASSES):
            fresh = [process for process in self.find() if (process.pid, process.start) not in seen]
            if not fresh:
                break
            self.signal(fresh, signal.SIGSTOP)
            seen.update({(process.pid, process.start): process for process in fresh})
        self.signal(seen.values(), signal.SIGKILL)
        prey = set(seen)
        self._same = self._same + 1 if prey and prey == self._prey else 0
        self._prey = prey
        if not prey or len(self._untouchable) < len({pid for pid, _ in prey}):
            self._untouchable_since = 0.0
        elif not self._untouchable_since:
            self._untouchable_since = time.monotonic()
        caught = self._pursue() if self._same == 0 else 0
        return bool(prey or caught)

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
        """For some milliseconds, kill each process of ours as it is born. Returns how many."""
        caught: Set[Tuple[int, int]] = set()
        until = time.monotonic() + _PURSUIT_S
        before = last_pid()
        while time.monotonic() < until:
            last = last_pid()
            # Ids that were given since the last look, and some before: one is given a while before its process can be seen.
            # Where the ids wrap around, the last few before it are missed once.
            count = max(_WINDOW, min(_MOST, last - before))
            before = last
            for pid in range(last, max(1, last - count), -1):
                process = read_process(pid)
                if process is not None and process.is_alive and self._owns(process):
                    self.signal([process], signal.SIGKILL)
                    caught.add((process.pid, process.start))
        return len(caught)
