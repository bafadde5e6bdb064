"""Processes as /proc shows them, and the few calls of the kernel that Python has no name for."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
from typing import AbstractSet, Dict, Iterable, Iterator, List, NamedTuple, Optional, Set, Tuple

from distflow.runtime.clock import now

__all__ = [
    "Process",
    "adopt_orphans",
    "boot_id",
    "carries",
    "close_all_but",
    "die_with_parent",
    "find_program",
    "hide_memory",
    "is_below",
    "is_same",
    "last_pid",
    "list_processes",
    "mark_of",
    "name_of",
    "only_descendants",
    "open_many",
    "read_process",
    "reap",
    "rename_self",
    "reset_limits",
    "reset_signals",
    "said_by",
    "started_at",
    "variable_of",
]

_KILLED_S = 1.0
_PR_SET_PDEATHSIG = 1
_PR_SET_DUMPABLE = 4
_PR_SET_NAME = 15
_PR_SET_CHILD_SUBREAPER = 36
_LIBC = ctypes.CDLL(None, use_errno=True)
_FILES = resource.getrlimit(resource.RLIMIT_NOFILE)
"""How many descriptors this login lets a process have, and how many it may ask for."""


class Process(NamedTuple):
    """One line of /proc/PID/stat. ``start`` is in clock ticks since boot; with ``pid`` it names a process for ever."""

    pid: int
    ppid: int
    pgid: int
    sid: int
    state: str
    start: int
    threads: int = 1

    @property
    def is_alive(self) -> bool:
        """Whether it can still do anything: a zombie cannot, unless only its first thread has ended and others run."""
        return self.state not in "ZXx" or self.threads > 1


def _prctl(option: int, argument: object) -> None:
    if _LIBC.prctl(option, argument, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def hide_memory() -> None:
    """Let nobody but root look into this process, and the kernel write none of it to a file."""
    _prctl(_PR_SET_DUMPABLE, 0)


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


def open_many() -> None:
    """Have as many descriptors as may be asked for: most logins let a process have 1024."""
    _limit_files(_FILES[1])


def reset_limits() -> None:
    """Be as the login was: programs that call select() rely on it."""
    _limit_files(_FILES[0])


def _limit_files(soft: int) -> None:
    with contextlib.suppress(OSError, ValueError):  # a hard limit above what the kernel gives anybody (fs.nr_open)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, _FILES[1]))


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


def find_program(name: str, path: str) -> Optional[str]:
    """The first program of this name in ``path``, as a shell would find it."""
    for directory in path.split(":"):
        candidate = os.path.join(directory or ".", name)
        if os.path.isfile(candidate) and os.access(candidate, os.X_OK):
            return candidate
    return None


def said_by(argv: List[str], timeout_s: float) -> Optional[str]:
    """What a program prints; None when it is not there, fails, or takes too long."""
    import subprocess

    null = subprocess.DEVNULL
    try:
        process = subprocess.Popen(argv, stdin=null, stdout=subprocess.PIPE, stderr=null)
    except OSError:
        return None
    # Not `run`, which waits without end for what it has killed: one that hangs in a driver does not die.
    for limit_s in (timeout_s, _KILLED_S):
        try:
            said = process.communicate(timeout=limit_s)[0]
        except subprocess.TimeoutExpired:
            process.kill()
        else:
            return said.decode("utf-8", "replace") if process.returncode == 0 else None
    return None


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
    numbers = [int(fields[number]) for number in (1, 2, 3, 17, 19)]
    return Process(pid, numbers[0], numbers[1], numbers[2], fields[0].decode(), start=numbers[4], threads=numbers[3])


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


def carries(pid: int, entry: str) -> bool:
    """Whether the process's environment holds exactly ``entry`` (``NAME=value``), as far as we may read it."""
    return entry.encode() in _environment(pid)


def mark_of(pid: int) -> Optional[str]:
    """The attempt that a process belongs to, by the mark in its environment, as far as we may read it."""
    return variable_of(pid, "DISTFLOW_ATTEMPT")


def variable_of(pid: int, name: str) -> Optional[str]:
    """A variable that a process was started with, as far as we may read its environment."""
    mark = name.encode() + b"="
    return next((os.fsdecode(one[len(mark) :]) for one in _environment(pid) if one.startswith(mark)), None)


def _environment(pid: int) -> List[bytes]:
    """The variables that a process was started with, as far as we may read them."""
    try:
        with open("/proc/{}/environ".format(pid), "rb") as file:
            text = file.read()
        if not text:  # its first thread has ended; others may run
            for thread in os.listdir("/proc/{}/task".format(pid)):
                with contextlib.suppress(OSError), open("/proc/{}/task/{}/environ".format(pid, thread), "rb") as file:
                    text = text or file.read()
    except OSError:
        return []
    return text.split(b"\0")


def name_of(pid: int) -> str:
    """What the kernel calls a process; empty when it is gone."""
    try:
        with open("/proc/{}/comm".format(pid), encoding="utf-8", errors="replace") as file:
            return file.read().rstrip("\n")
    except OSError:
        return ""


def started_at(process: Process) -> float:
    """When a process was started, in seconds since the epoch by the node's clock of now."""
    with open("/proc/uptime", "rb", buffering=0) as file:
        up = float(file.read(128).split()[0])
    return now() - up + process.start / os.sysconf("SC_CLK_TCK")


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


def is_below(process: Process, root: int, spare: AbstractSet[int] = frozenset()) -> bool:
    """Whether ``process`` descends from ``root``, by way of none of ``spare``. Reads only its ancestors."""
    current: Optional[Process] = process
    for _ in range(64):
        if current is None or current.pid in spare or current.ppid <= 1:
            return False
        if current.ppid == root:
            return True
        parent = read_process(current.ppid)
        # The parent died while we looked: its child has a new one, perhaps `root` itself.
        current = parent if parent is not None else read_process(current.pid)
    return False


def last_pid() -> int:
    """The id that the kernel gave away last."""
    with open("/proc/loadavg", "rb", buffering=0) as file:
        return int(file.read(128).split()[-1])


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
