"""What the kernel's log says of an attempt that failed: whether the kernel killed it for want of memory, and errors of GPUs.

The log is read where this user may (``kernel.dmesg_restrict=0``, CAP_SYSLOG, or journald's groups); elsewhere nothing is known.
Reading it never fails, and never takes long.
"""

from __future__ import annotations

import ctypes
import os
import re
import time
from typing import Any, Callable, Collection, Iterator, List, NamedTuple, Optional, Set

from distflow.runtime import processes
from distflow.runtime.clock import now
from distflow.runtime.files import log_files
from distflow.runtime.guard import cgroups
from distflow.runtime.leases import gpu_buses
from distflow.runtime.wire import Json

__all__ = ["Kill", "Line", "ask", "judge", "kills", "named_pids", "parse", "xids"]

_READ_ALL, _SIZE = 3, 10
_MOST_BYTES = 4 * 1024 * 1024
_JOURNAL_S = 0.6
_SLACK_S = 2.0
_MOST_LINES = 8
_LONGEST_LINE = 400
_TAIL = 16 * 1024

_STAMPED = re.compile(r"(?:<\d+>)?\[\s*(\d+\.\d+)\](?:\[\s*[TC]\d+\])? ?(.*)")
"""Of ``dmesg`` and of ``journalctl -o short-monotonic``; the second brackets are CONFIG_PRINTK_CALLER's."""
_JOURNAL = re.compile(r"^\S+ kernel: ")
_WORTH = re.compile(r"Killed process \d|oom-kill:|killed as a result of limit of|NVRM: Xid")
_KILLED = re.compile(r"Killed process (\d+)")
_UID = re.compile(r"\b(?:UID[: ]|uid=)(\d+)")
_PLACE = re.compile(r"task_memcg=([^,]+)|Task in (\S+) killed")
_CONSTRAINT = re.compile(r"oom-kill:.*\bpid=(\d+)")
_XID = re.compile(r"NVRM: Xid\b")
_NAMED = re.compile(rb"(?i)\bp(?:id|rocess)\W{0,3}(\d{1,7})\b|\b(\d{1,7}) Killed\b")


class Line(NamedTuple):
    """One line, with its time in seconds since the boot."""

    at: float
    text: str


class Kill(NamedTuple):
    """A process that the kernel killed for want of memory."""

    at: float
    pid: int
    uid: Optional[int]
    cgroup: Optional[str]
    """The memory cgroup that it was in; None where the kernel does not say."""
    lines: List[str]
    """What the kernel said of it: where the limit was, and the kill."""


def ask(
    began_at: Optional[float],
    ended_at: float,
    pids: Collection[int],
    is_killed: bool,
    container: str = "",
    other_gpus: Collection[str] = (),
) -> Optional[Json]:
    """What the kernel says of an attempt that ran from ``began_at`` to ``ended_at``; None when nothing, or nobody may ask.

    ``pids`` are those that are known to be of it; ``is_killed``: its command ended by SIGKILL, or as a shell tells of one;
    ``container``: the number of the container that it ran in, after which engines name its cgroup; ``other_gpus``:
    where those GPUs are that are not its own.
    """
    try:
        at, here = now(), time.monotonic()
        # The kernel stamps its lines by a clock that drifts from ours about as much as the raw one does.
        slack_s = _SLACK_S + abs(here - time.clock_gettime(time.CLOCK_MONOTONIC_RAW))
        began, ended = here - (at - (began_at or ended_at)), here - (at - ended_at)
        lines = parse(_syslog() or _journal())
        seen = [line for line in lines if began - slack_s <= line.at <= ended + slack_s]
        me, place = os.getuid(), _memory_cgroup()

        def is_likely(kill: Kill) -> bool:
            if container:
                return is_killed and container in (kill.cgroup or "")
            return is_killed and abs(kill.at - ended) <= slack_s and kill.uid in (None, me) and _is_at(kill.cgroup, place)

        return judge(seen, pids, is_likely, other_gpus)
    except Exception:  # whatever an unusual kernel says: the end of the attempt is told all the same
        return None


def xids() -> List[str]:
    """The last errors of GPUs since the boot; none where nobody may ask."""
    try:
        found = [line.text[:_LONGEST_LINE] for line in parse(_syslog() or _journal()) if _XID.search(line.text)]
        return found[-_MOST_LINES:]
    except Exception:  # as above
        return []


def parse(text: str) -> List[Line]:
    """The lines that may matter."""
    found = []
    for line in text.split("\n"):
        if not _WORTH.search(line):
            continue
        match = _STAMPED.match(line)
        if match:
            found.append(Line(float(match.group(1)), _JOURNAL.sub("", match.group(2), 1)))
    return found


def kills(lines: List[Line]) -> Iterator[Kill]:
    """The kills that lines tell of. Before Linux 5.0 the limit is told apart from the process that it cost."""
    before: List[str] = []
    for line in lines:
        match = _KILLED.search(line.text)
        if match is None:
            if not _XID.search(line.text):
                before.append(line.text)
            continue
        pid = int(match.group(1))
        told = [*(text for text in before[-1:] if _is_about(text, pid)), line.text]
        uids = [uid.group(1) for uid in map(_UID.search, told) if uid]
        places = [place.group(1) or place.group(2) for place in map(_PLACE.search, told) if place]
        yield Kill(line.at, pid, int(uids[0]) if uids else None, places[0] if places else None, told)
        before = []


def judge(
    lines: List[Line], pids: Collection[int], is_likely: Callable[[Kill], bool], other_gpus: Collection[str] = ()
) -> Optional[Json]:
    """What lines of an attempt's time mean for it: ``{"oom_pid", "lines"}``; None for nothing.

    A kill is its own when the process is known to be, else when it ``is_likely`` (in the moments of the attempt's own end by
    SIGKILL, in its cgroup): a shell tells that its child was killed, and not which process that was. An error of a GPU
    is told unless that is known to be another's: one in a place that nobody named may be the attempt's.
    """
    everything = list(kills(lines))
    own = [kill for kill in everything if kill.pid in pids] or [kill for kill in everything if is_likely(kill)]
    xids = [line.text for line in lines if _XID.search(line.text) and not gpu_buses.is_of_another(line.text, other_gpus, pids)]
    told = (own[0].lines if own else []) + xids
    if not told:
        return None
    return {"oom_pid": own[0].pid if own else None, "lines": [text[:_LONGEST_LINE] for text in told[:_MOST_LINES]]}


def named_pids(directory: str, error: Any) -> Set[int]:
    """Processes that the attempt's error file or the end of its output names, as torchrun and shells do of those that died."""
    found = set()
    if isinstance(error, dict) and isinstance(error.get("pid"), int):
        found.add(error["pid"])
    try:
        newest = log_files.segments(directory, "log")[-1:] or [log_files.Segment(0, 0, "log")]
        with open(os.path.join(directory, newest[0].name), "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL))
            found.update(int(one or other) for one, other in _NAMED.findall(file.read(_TAIL)))
    except OSError:
        pass
    return found


def _is_about(text: str, pid: int) -> bool:
    constraint = _CONSTRAINT.search(text)
    return constraint is None or int(constraint.group(1)) == pid


def _memory_cgroup() -> str:
    """Ours, which those that we start are in as long as nobody moves them."""
    with open("/proc/self/cgroup", encoding="utf-8", errors="replace") as file:
        places = dict(line.rstrip("\n").split(":", 2)[1:] for line in file)
    return places.get("memory") or places.get("") or "/"


def _is_at(cgroup: Optional[str], place: str) -> bool:
    """Whether a killed process was where we are, or in a cgroup that we made there for an attempt."""
    return cgroup == place or (cgroup is not None and cgroups.is_one(cgroup) and os.path.dirname(cgroup) == place)


def _syslog() -> str:
    """The kernel's own buffer; empty when it may not be read."""
    libc = ctypes.CDLL(None, use_errno=True)
    size = min(libc.klogctl(_SIZE, None, 0), _MOST_BYTES)
    if size <= 0:
        return ""
    buffer = ctypes.create_string_buffer(size)
    got = libc.klogctl(_READ_ALL, buffer, size)
    return buffer.raw[:got].decode("utf-8", "replace") if got > 0 else ""


def _journal() -> str:
    """What journald kept of it; empty when there is none, or this user may not read it."""
    program = processes.find_program("journalctl", os.environ.get("PATH", ""))
    if program is None:
        return ""
    argv = [program, "--dmesg", "--quiet", "--no-pager", "--output=short-monotonic", "--lines=4000"]
    return processes.said_by(argv, _JOURNAL_S) or ""
