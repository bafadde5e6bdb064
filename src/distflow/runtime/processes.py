"""Processes as /proc shows them, and system calls that Python does not provide."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal

from distflow.protocol.light_typing import AbstractSet, Dict, Iterable, Iterator, List, NamedTuple, Optional, Set, Tuple
from distflow.runtime.clock import now

__all__ = [
    "Process",
    "adopt_orphans",
    "attempt_of",
    "boot_id",
    "close_all_but",
    "die_with_parent",
    "find_program",
    "has_variable",
    "hide_memory",
    "is_alive",
    "is_below",
    "last_pid",
    "list_processes",
    "name_of",
    "only_descendants",
    "output_of",
    "raise_descriptor_limit",
    "read_process",
    "reap",
    "rename_self",
    "reset_descriptor_limit",
    "reset_signals",
    "started_at",
    "sync_file_system",
    "variable_of",
]

_KILLED_S = 1.0
"""How long to wait for the end of a killed program."""
_PR_SET_PDEATHSIG = 1
_PR_SET_DUMPABLE = 4
_PR_SET_NAME = 15
_PR_SET_CHILD_SUBREAPER = 36
_LIBC = ctypes.CDLL(None, use_errno=True)
_FILES = resource.getrlimit(resource.RLIMIT_NOFILE)
"""Soft and hard limit of descriptors for this login."""


class Process(NamedTuple):
    """Fields of /proc/PID/stat. ``start`` is in clock ticks since boot. The pair of pid and start is unique within a boot."""

    pid: int
    ppid: int
    pgid: int
    sid: int
    state: str
    start: int
    threads: int = 1

    @property
    def is_alive(self) -> bool:
        """Whether the process can still run. A zombie cannot, unless only its first thread has ended and others run."""
        return self.state not in "ZXx" or self.threads > 1


def _prctl(option: int, argument: object) -> None:
    if _LIBC.prctl(option, argument, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def hide_memory() -> None:
    """Prevent all users except root from reading this process's memory, and the kernel from dumping it to a file."""
    _prctl(_PR_SET_DUMPABLE, 0)


def sync_file_system(directory: str) -> None:
    """Write all changes in the file system of a directory to its disk."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        if _LIBC.syncfs(fd) != 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), directory)
    finally:
        os.close(fd)


def adopt_orphans() -> None:
    """Make this process a child subreaper: the new parent of descendants whose own parent dies."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent(signum: int, parent: int) -> bool:
    """Let the kernel send ``signum`` to this process when ``parent`` dies. Returns False if ``parent`` is dead already."""
    _prctl(_PR_SET_PDEATHSIG, int(signum))
    return os.getppid() == parent


def rename_self(name: str) -> None:
    """Set the name that ``ps -o comm`` and ``top`` show. It is cut at 15 bytes."""
    _prctl(_PR_SET_NAME, ctypes.c_char_p(name.encode()[:15]))


def raise_descriptor_limit() -> None:
    """Raise the limit of descriptors to the hard limit: for most logins, the soft limit is 1024."""
    _limit_files(_FILES[1])


def reset_descriptor_limit() -> None:
    """Restore the login's limit of descriptors: programs that call select() rely on it."""
    _limit_files(_FILES[0])


def _limit_files(soft: int) -> None:
    with contextlib.suppress(OSError, ValueError):  # the hard limit may exceed the kernel's own limit (fs.nr_open)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, _FILES[1]))


def reset_signals() -> None:
    """Reset all signals to their defaults, and unblock them. Python ignores SIGPIPE and SIGXFSZ, and exec would keep that."""
    for number in signal.valid_signals():
        if number not in (signal.SIGKILL, signal.SIGSTOP):
            try:
                signal.signal(number, signal.SIG_DFL)
            except (OSError, ValueError):
                continue  # the C library keeps some real-time signals for itself
    signal.pthread_sigmask(signal.SIG_SETMASK, [])


def close_all_but(keep: AbstractSet[int]) -> None:
    """Close every descriptor except 0, 1, 2 and those in ``keep``."""
    for name in os.listdir("/proc/self/fd"):
        fd = int(name)
        if fd > 2 and fd not in keep:
            try:
                os.close(fd)
            except OSError:
                continue  # the listing's own descriptor


def find_program(name: str, path: str) -> Optional[str]:
    """Return the path of the first program of this name in ``path``, as a shell would find it, or None."""
    for directory in path.split(":"):
        candidate = os.path.join(directory or ".", name)
        if os.path.isfile(candidate) and os.access(candidate, os.X_OK):
            return candidate
    return None


def output_of(argv: List[str], timeout_s: float) -> Optional[str]:
    """Return a program's standard output; None if the program is missing, fails, or takes too long."""
    import subprocess

    null = subprocess.DEVNULL
    try:
        process = subprocess.Popen(argv, stdin=null, stdout=subprocess.PIPE, stderr=null)
    except OSError:
        return None
    # Not `subprocess.run`: after a timeout, it would wait without a limit for a program that hangs in a driver.
    for limit_s in (timeout_s, _KILLED_S):
        try:
            output = process.communicate(timeout=limit_s)[0]
        except subprocess.TimeoutExpired:
            process.kill()
        else:
            return output.decode("utf-8", "replace") if process.returncode == 0 else None
    return None


def boot_id() -> str:
    """Return the kernel's id of this boot."""
    with open("/proc/sys/kernel/random/boot_id", encoding="utf-8") as file:
        return file.read().strip()


def read_process(pid: int) -> Optional[Process]:
    """Return the process with this id, or None."""
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
    """Yield all currently visible processes."""
    for name in os.listdir("/proc"):
        if name.isdigit():
            process = read_process(int(name))
            if process is not None:
                yield process


def is_alive(pid: int, start: int) -> bool:
    """Return whether the process with this id and start time is alive."""
    process = read_process(pid)
    return process is not None and process.start == start and process.is_alive


def has_variable(pid: int, entry: str) -> bool:
    """Return whether a process's initial environment has the entry ``NAME=value``; False if it is not readable."""
    return entry.encode() in _environment(pid)


def attempt_of(pid: int) -> Optional[str]:
    """Return the name of the attempt in a process's environment; None if it is not set or not readable."""
    return variable_of(pid, "DISTFLOW_ATTEMPT")


def variable_of(pid: int, name: str) -> Optional[str]:
    """Return a variable of a process's initial environment; None if it is not set or not readable."""
    mark = name.encode() + b"="
    return next((os.fsdecode(one[len(mark) :]) for one in _environment(pid) if one.startswith(mark)), None)


def _environment(pid: int) -> List[bytes]:
    """Return the entries of a process's initial environment; empty if it is not readable."""
    try:
        with open("/proc/{}/environ".format(pid), "rb") as file:
            text = file.read()
        if not text:  # the first thread has ended, but others may run
            for thread in os.listdir("/proc/{}/task".format(pid)):
                with contextlib.suppress(OSError), open("/proc/{}/task/{}/environ".format(pid, thread), "rb") as file:
                    text = text or file.read()
    except OSError:
        return []
    return text.split(b"\0")


def name_of(pid: int) -> str:
    """Return the kernel's name of a process; empty if the process is gone."""
    try:
        with open("/proc/{}/comm".format(pid), encoding="utf-8", errors="replace") as file:
            return file.read().rstrip("\n")
    except OSError:
        return ""


def started_at(process: Process) -> float:
    """Return when a process was started, in seconds since the epoch by the node's current clock."""
    with open("/proc/uptime", "rb", buffering=0) as file:
        up = float(file.read(128).split()[0])
    return now() - up + process.start / os.sysconf("SC_CLK_TCK")


def only_descendants(processes: Iterable[Process], root: int, spare: AbstractSet[int] = frozenset()) -> List[Process]:
    """Return the descendants of ``root``, except for the processes in ``spare`` and their descendants."""
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
    """Return whether ``process`` descends from ``root``, and neither it nor a process in between is in ``spare``.

    This reads only the ancestors of ``process``, at most 64 of them.
    """
    current: Optional[Process] = process
    for _ in range(64):
        if current is None or current.pid in spare or current.ppid <= 1:
            return False
        if current.ppid == root:
            return True
        parent = read_process(current.ppid)
        # If the parent has just died, its child has a new parent, perhaps `root` itself.
        current = parent if parent is not None else read_process(current.pid)
    return False


def last_pid() -> int:
    """Return the process id that the kernel assigned last."""
    with open("/proc/loadavg", "rb", buffering=0) as file:
        return int(file.read(128).split()[-1])


def reap() -> Tuple[List[Tuple[int, int]], bool]:
    """Reap every ended child. Returns ``[(pid, status)]``, and whether children remain."""
    ended: List[Tuple[int, int]] = []
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return ended, False
        if pid == 0:
            return ended, True
        ended.append((pid, status))
