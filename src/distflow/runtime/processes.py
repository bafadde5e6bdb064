"""Processes as /proc shows them, and how to end all descendants of one.

A process that adopts orphans (a child subreaper) can end a whole tree whatever its members do: stop all that are seen, kill
them, reap, and look again until the kernel says that no child is left.
"""

from __future__ import annotations

import ctypes
import os
import signal
from typing import AbstractSet, Callable, Dict, Iterable, Iterator, List, NamedTuple, Optional, Set, Tuple

__all__ = [
    "Hunt",
    "Process",
    "adopt_orphans",
    "boot_id",
    "carriers",
    "close_all_but",
    "die_with_parent",
    "is_same",
    "list_processes",
    "only_descendants",
    "read_process",
    "reap",
    "rename_self",
    "reset_signals",
]

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_PR_SET_CHILD_SUBREAPER = 36
_LIBC = ctypes.CDLL(None, use_errno=True)


class Process(NamedTuple):
    """One line of /proc/PID/stat. ``start`` is in clock ticks since boot; with ``pid`` it names a process for ever."""

    pid: int
    ppid: int
    pgid: int
    sid: int
    state: str
    start: int

    @property
    def is_alive(self) -> bool:
        """Whether it can still do anything: a zombie cannot."""
        return self.state not in "ZXx"


def _prctl(option: int, argument: object) -> None:
    if _LIBC.prctl(option, argument, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def adopt_orphans() -> None:
    """Make this process the new parent of every descendant whose own parent dies."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent(signum: int, parent: int) -> bool:
    """Get ``signum`` when ``parent`` dies. False: it is dead already."""
    _prctl(_PR_SET_PDEATHSIG, int(signum))
    return os.getppid() == parent


def rename_self(name: str) -> None:
    """The name that ``ps -o comm`` and ``top`` show (15 bytes)."""
    _prctl(_PR_SET_NAME, ctypes.c_char_p(name.encode()[:15]))


def reset_signals() -> None:
    """Every signal as a fresh program expects it: Python ignores SIGPIPE and SIGXFSZ, and exec would pass that on."""
    for number in signal.valid_signals():
        if number not in (signal.SIGKILL, signal.SIGSTOP):
            try:
                signal.signal(number, signal.SIG_DFL)
            except (OSError, ValueError):
                continue  # the C library keeps some real-time signals for itself
    signal.pthread_sigmask(signal.SIG_SETMASK, [])


def close_all_but(keep: AbstractSet[int]) -> None:
    """Close every descriptor that is not in ``keep`` nor 0, 1 or 2."""
    for name in os.listdir("/proc/self/fd"):
        fd = int(name)
        if fd > 2 and fd not in keep:
            try:
                os.close(fd)
            except OSError:
                continue  # the listing's own descriptor


def boot_id() -> str:
    """The kernel's name for this boot."""
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return file.read().strip()


def read_process(pid: int) -> Optional[Process]:
    """The process with this id, or None."""
    try:
        with open("/proc/{}/stat".format(pid), "rb", buffering=0) as file:
            text = file.read(1024)
    except OSError:
        return None
    fields = text[text.rfind(b")") + 2 :].split()
    if len(fields) < 20:
        return None
    return Process(pid, int(fields[1]), int(fields[2]), int(fields[3]), fields[0].decode(), int(fields[19]))


def list_processes() -> Iterator[Process]:
    """All processes that can be seen now."""
    for name in os.listdir("/proc"):
        if name.isdigit():
            process = read_process(int(name))
            if process is not None:
                yield process


def is_same(pid: int, start: int) -> bool:
    """Whether the process of this id and start time is alive."""
    process = read_process(pid)
    return process is not None and process.start == start and process.is_alive


def carriers(entry: str) -> List[int]:
    """Ids of processes whose environment holds exactly ``entry`` (``NAME=value``), as far as we may read it."""
    wanted = b"\0" + entry.encode() + b"\0"
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open("/proc/{}/environ".format(name), "rb") as file:
                    environment = file.read()
            except OSError:
                continue
            if wanted in b"\0" + environment + b"\0":
                found.append(int(name))
    return found


def only_descendants(processes: Iterable[Process], root: int, spare: AbstractSet[int] = frozenset()) -> List[Process]:
    """Those below ``root``, without the trees of ``spare``."""
    children: Dict[int, List[Process]] = {}
    for process in processes:
        children.setdefault(process.ppid, []).append(process)
    found: List[Process] = []
    waiting = [root]
    known: Set[int] = {root}
    while waiting:
        for child in children.get(waiting.pop(), ()):
            if child.pid not in known and child.pid not in spare:
                known.add(child.pid)
                found.append(child)
                waiting.append(child.pid)
    return found


def reap() -> Tuple[List[Tuple[int, int]], bool]:
    """Take every child that has ended: ``[(pid, status)]``, and whether children are left."""
    ended: List[Tuple[int, int]] = []
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return ended, False
        if pid == 0:
            return ended, True
        ended.append((pid, status))


class Hunt:
    """Ends every process that ``find`` picks from the list of all processes, however fast they fork.

    One ``step`` stops what it sees (so that it cannot fork), looks again until nothing new is there, and kills. Signals go to
    the process and to its process group: the kernel delivers to a group atomically, so a chain of daemons that fork and exit
    faster than /proc can be read is hit although each of its members is gone when its id is known.
    """

    _PASSES = 6

    def __init__(self, find: Callable[[List[Process]], List[Process]]) -> None:
        self._find = find
        self._own_group = os.getpgrp()
        self.untouchable: Dict[int, int] = {}
        """Processes that we may not signal (another user's, such as what ``sudo`` started): id → start time."""

    def step(self) -> int:
        """Stop, then kill, what is there now. Returns how many living processes were seen that we may signal."""
        seen: Dict[Tuple[int, int], Process] = {}
        self.untouchable.clear()
        for _ in range(self._PASSES):
            fresh = [p for p in self._find(list(list_processes())) if p.is_alive and (p.pid, p.start) not in seen]
            if not fresh:
                break
            self.signal(fresh, signal.SIGSTOP)
            for process in fresh:
                seen[process.pid, process.start] = process
        self.signal(seen.values(), signal.SIGKILL)
        return sum(1 for process in seen.values() if process.pid not in self.untouchable)

    def signal(self, processes: Iterable[Process], signum: int) -> None:
        """Send ``signum`` to processes and to their groups."""
        groups: Set[int] = set()
        for process in processes:
            try:
                os.kill(process.pid, signum)
            except PermissionError:
                self.untouchable[process.pid] = process.start
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

    def find(self) -> List[Process]:
        """What is there now and alive."""
        return [process for process in self._find(list(list_processes())) if process.is_alive]
