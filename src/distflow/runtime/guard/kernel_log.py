"""Entries of the kernel's log about a failed attempt: kills for lack of memory, and GPU errors.

The log is readable if ``kernel.dmesg_restrict`` is 0, the user has CAP_SYSLOG, or the user is in one of journald's groups.
Otherwise no entries are found. Reading the log raises no errors. It takes less than a second, unless ``journalctl`` hangs and
cannot be killed.
"""

from __future__ import annotations

import ctypes
import os
import re
import time

from distflow.protocol.light_typing import Any, Callable, Collection, Iterator, List, NamedTuple, Optional, Set
from distflow.runtime import processes
from distflow.runtime.clock import now
from distflow.runtime.files import log_files
from distflow.runtime.guard import process_tree
from distflow.runtime.leases import gpu_users
from distflow.runtime.wire import Json

__all__ = ["MAX_LINES", "KernelLogLine", "Kill", "find_entries", "gpu_errors", "kills", "named_pids", "parse", "select_entries"]

_READ_ALL, _SIZE = 3, 10
_MAX_BYTES = 4 * 1024 * 1024
_JOURNAL_S = 0.6
_SLACK_S = 2.0
MAX_LINES = 8
_MAX_LINE = 400
_TAIL = 16 * 1024

_STAMPED = re.compile(r"(?:<\d+>)?\[\s*(\d+\.\d+)\](?:\[\s*[TC]\d+\])? ?(.*)")
"""Line of ``dmesg`` or ``journalctl -o short-monotonic``. The second pair of brackets comes from CONFIG_PRINTK_CALLER."""
_JOURNAL = re.compile(r"^\S+ kernel: ")
_RELEVANT = re.compile(r"Killed process \d|oom-kill:|killed as a result of limit of|NVRM: Xid")
_KILLED = re.compile(r"Killed process (\d+)")
_UID = re.compile(r"\b(?:UID[: ]|uid=)(\d+)")
_CGROUP = re.compile(r"task_memcg=([^,]+)|Task in (\S+) killed")
_OOM_VICTIM = re.compile(r"oom-kill:.*\bpid=(\d+)")
_XID = re.compile(r"NVRM: Xid\b")
_NAMED = re.compile(rb"(?i)\bp(?:id|rocess)\W{0,3}(\d{1,7})\b|\b(\d{1,7}) Killed\b")


class KernelLogLine(NamedTuple):
    """One line, with its time in seconds since the boot."""

    at: float
    text: str


class Kill(NamedTuple):
    """A process that the kernel killed for lack of memory."""

    at: float
    pid: int
    uid: Optional[int]
    cgroup: Optional[str]
    """The process's memory cgroup; None if the kernel does not report it."""
    lines: List[str]
    """The kernel's lines about the exceeded limit and the kill."""


def find_entries(
    began_at: Optional[float],
    ended_at: float,
    pids: Collection[int],
    is_killed: bool,
    container: str = "",
    other_gpus: Collection[str] = (),
) -> Optional[Json]:
    """Return the kernel's entries for an attempt that ran from ``began_at`` (None: not known) to ``ended_at``.

    Without a start time, only entries near the end count. Returns None if there are none or the log is not readable.

    ``pids`` are known process ids of the attempt. ``is_killed``: whether its command ended by SIGKILL, or with the exit code by
    which a shell reports SIGKILL. ``container``: the id of its container, which is part of the cgroup's name. ``other_gpus``:
    PCI bus addresses of GPUs that do not belong to the attempt.
    """
    try:
        wall, monotonic = now(), time.monotonic()
        # The kernel's log uses a clock that NTP does not adjust, like CLOCK_MONOTONIC_RAW. Allow for its drift.
        slack_s = _SLACK_S + abs(monotonic - time.clock_gettime(time.CLOCK_MONOTONIC_RAW))
        began, ended = monotonic - (wall - (began_at or ended_at)), monotonic - (wall - ended_at)
        lines = parse(_syslog() or _journal())
        during = [line for line in lines if began - slack_s <= line.at <= ended + slack_s]
        me, own_cgroup = os.getuid(), _memory_cgroup()

        def is_likely(kill: Kill) -> bool:
            if container:
                return is_killed and container in (kill.cgroup or "")
            return is_killed and abs(kill.at - ended) <= slack_s and kill.uid in (None, me) and _is_in(kill.cgroup, own_cgroup)

        return select_entries(during, pids, is_likely, other_gpus)
    except Exception:  # the end of the attempt must be reported even if this kernel's log has an unknown format
        return None


def gpu_errors() -> List[str]:
    """Return the last GPU errors since the boot, at most 8; empty if the log is not readable."""
    try:
        found = [line.text[:_MAX_LINE] for line in parse(_syslog() or _journal()) if _XID.search(line.text)]
        return found[-MAX_LINES:]
    except Exception:  # see `find_entries`
        return []


def parse(text: str) -> List[KernelLogLine]:
    """Return the relevant lines of the log."""
    found = []
    for line in text.split("\n"):
        if not _RELEVANT.search(line):
            continue
        match = _STAMPED.match(line)
        if match:
            found.append(KernelLogLine(float(match.group(1)), _JOURNAL.sub("", match.group(2), 1)))
    return found


def kills(lines: List[KernelLogLine]) -> Iterator[Kill]:
    """Yield the kills among the lines. The line before a kill may name the cgroup of the killed process."""
    before: List[str] = []
    for line in lines:
        match = _KILLED.search(line.text)
        if match is None:
            if not _XID.search(line.text):
                before.append(line.text)
            continue
        pid = int(match.group(1))
        relevant = [*(text for text in before[-1:] if _is_about(text, pid)), line.text]
        uids = [uid.group(1) for uid in map(_UID.search, relevant) if uid]
        cgroups = [match.group(1) or match.group(2) for match in map(_CGROUP.search, relevant) if match]
        yield Kill(line.at, pid, int(uids[0]) if uids else None, cgroups[0] if cgroups else None, relevant)
        before = []


def select_entries(
    lines: List[KernelLogLine], pids: Collection[int], is_likely: Callable[[Kill], bool], other_gpus: Collection[str] = ()
) -> Optional[Json]:
    """Return ``{"oom_pid", "lines"}`` for the lines logged during an attempt, or None. Only its first kill is included.

    A kill belongs to the attempt if ``pids`` contains its process. If there is no such kill, a kill for which ``is_likely``
    returns True belongs to it, because shells such as dash do not report the id of a killed child. A GPU error is included
    unless its GPU is one of ``other_gpus`` and the error names no process in ``pids``.
    """
    everything = list(kills(lines))
    own = [kill for kill in everything if kill.pid in pids] or [kill for kill in everything if is_likely(kill)]
    xids = [
        line.text for line in lines if _XID.search(line.text) and not gpu_users.is_xid_of_another(line.text, other_gpus, pids)
    ]
    relevant = (own[0].lines if own else []) + xids
    if not relevant:
        return None
    return {"oom_pid": own[0].pid if own else None, "lines": [text[:_MAX_LINE] for text in relevant[:MAX_LINES]]}


def named_pids(directory: str, error: Any) -> Set[int]:
    """Return the process ids in the attempt's error file and at the end of its output.

    torchrun and some shells, such as bash, name dead processes there.
    """
    found = set()
    if isinstance(error, dict) and isinstance(error.get("pid"), int):
        found.add(error["pid"])
    try:
        newest = log_files.segments(directory, "log")[-1:] or [log_files.LogSegment(0, 0, "log")]
        with open(os.path.join(directory, newest[0].name), "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL))
            found.update(int(one or other) for one, other in _NAMED.findall(file.read(_TAIL)))
    except OSError:
        pass
    return found


def _is_about(text: str, pid: int) -> bool:
    """Return whether a line before a kill may be about this process. Of these lines, only ``oom-kill:`` names a process."""
    victim = _OOM_VICTIM.search(text)
    return victim is None or int(victim.group(1)) == pid


def _memory_cgroup() -> str:
    """Return this process's memory cgroup, which its descendants share unless they are moved."""
    with open("/proc/self/cgroup", encoding="utf-8", errors="replace") as file:
        cgroups = dict(line.rstrip("\n").split(":", 2)[1:] for line in file)
    return cgroups.get("memory") or cgroups.get("") or "/"


def _is_in(cgroup: Optional[str], own_cgroup: str) -> bool:
    """Return whether a killed process was in this process's cgroup, or in an attempt's cgroup below it."""
    return cgroup == own_cgroup or (
        cgroup is not None and process_tree.is_attempt_cgroup(cgroup) and os.path.dirname(cgroup) == own_cgroup
    )


def _syslog() -> str:
    """Return the kernel's log buffer; empty if it is not readable."""
    libc = ctypes.CDLL(None, use_errno=True)
    size = min(libc.klogctl(_SIZE, None, 0), _MAX_BYTES)
    if size <= 0:
        return ""
    buffer = ctypes.create_string_buffer(size)
    got = libc.klogctl(_READ_ALL, buffer, size)
    return buffer.raw[:got].decode("utf-8", "replace") if got > 0 else ""


def _journal() -> str:
    """Return the last 4000 lines of the kernel's log in the journal; empty if there is none or it is not readable."""
    program = processes.find_program("journalctl", os.environ.get("PATH", ""))
    if program is None:
        return ""
    argv = [program, "--dmesg", "--quiet", "--no-pager", "--output=short-monotonic", "--lines=4000"]
    return processes.output_of(argv, _JOURNAL_S) or ""
