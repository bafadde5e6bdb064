"""When runner and keeper died together: find what is left of the attempt, end it, and write the record in their place."""

from __future__ import annotations

import contextlib
import os
import select
from typing import AbstractSet, List, Optional

from distflow.protocol.ends import EndReason
from distflow.runtime import processes
from distflow.runtime.files import attempt_files, attempts, log_files, records, secret_files
from distflow.runtime.guard import cgroups
from distflow.runtime.guard.kill_tree import TreeKiller
from distflow.runtime.wire import Json

__all__ = ["end_adopted", "is_pair_alive", "is_watched", "may_live", "settle"]


def is_pair_alive(state: Json) -> bool:
    """Whether the processes that ``runner.json`` names still live, as far as that can be seen from outside."""
    if state.get("boot_id") != processes.boot_id():
        return False
    pair = [state.get("runner") or {}, state.get("keeper") or {}]
    return any(processes.is_same(int(one.get("pid", 0)), int(one.get("start", 0))) for one in pair)


def is_watched(directory: str) -> bool:
    """Whether one of the attempt's pair lives, also when the end is on record already: it is then about to leave."""
    state = records.read_state(directory)
    return (state is not None and is_pair_alive(state)) or attempts.is_reachable(directory)


def may_live(directory: str) -> bool:
    """Whether somebody watches the attempt, here or, in a root that machines share, perhaps on another one."""
    if is_watched(directory):
        return True
    state = records.read_state(directory)
    return state is not None and state.get("host") not in (None, os.uname().nodename) and records.read_end(directory) is None


def settle(root: str, attempt: str, stopped: Optional[Json] = None) -> Json:
    """End what is left of an attempt without a pair and record that. Does nothing where that is not the case.

    Where somebody removed the attempt's directory while it ran, its processes are found by their mark, and nothing is recorded.
    ``stopped``: ``why`` it was asked to stop, and when (``stopped_at``), where that may not be on record yet.
    """
    directory = attempts.directory_of(root, attempt)
    try:
        lock = attempts.lock_task(directory, wait=True)
    except FileNotFoundError:
        _end_left(attempt, {})
        return {}
    try:
        state = records.read_state(directory)
        if state is None and not attempts.is_reachable(directory):
            _end_left(attempt, {})
        if state is None or records.read_end(directory) is not None or is_pair_alive(state):
            return {}
        reason = EndReason.BOTH_DIED
        message = "the two processes that watch a task were killed together (out of memory, or by hand?)"
        if state.get("boot_id") != processes.boot_id():
            reason, message = EndReason.REBOOTED, "the node was restarted while the task was on it"
        else:
            if stopped is not None and state.get("stopped_at") is None and not state.get("exit"):
                state.update(stopped)
            stop = records.stop_reason(state)
            if stop is not None:
                reason, message = stop, "the two processes that watch the task were killed while it was being stopped"
            message = _end_left(attempt, state) or message
        cgroups.remove(state.get("command") or {})
        dir_fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        secret_files.remove(directory)
        if attempt_files.has_secrets(directory):
            # Who knew them is gone: what they might stand in cannot be masked any more.
            with contextlib.suppress(OSError):
                os.unlink(os.path.join(directory, "error.json"))
        error = records.read_error(directory)
        known = dict(state.get("exit") or {}, message=message, output_bytes=log_files.end_of(directory), error=error)
        end = records.make_end(state, reason, **known)
        os.fsync(records.write_end(dir_fd, -1, end))
    finally:
        os.close(lock)
    return {}


def _end_left(attempt: str, state: Json) -> str:
    """End what is in the attempt's cgroup, carries its mark or belongs to its command's session, and all below those."""
    command = state.get("command") or {}
    session, start = int(command.get("pid") or 0), int(command.get("start") or 0)
    group = cgroups.name_of(command)
    spare = {os.getpid(), os.getppid()}

    def owns(process: processes.Process) -> bool:
        if process.pid in spare:
            return False
        if session > 1 and process.sid == session and process.start >= start:
            # A living leader with another start time: the command's id was given away again, and its session with it.
            leader = processes.read_process(session)
            if leader is None or leader.start == start:
                return True
        return (bool(group) and cgroups.of(process.pid) == group) or processes.carries(
            process.pid, "DISTFLOW_ATTEMPT=" + attempt
        )

    def find(everything: List[processes.Process]) -> List[processes.Process]:
        found = {process.pid: process for process in everything if owns(process)}
        for process in list(found.values()):
            for below in processes.only_descendants(everything, process.pid, spare):
                found[below.pid] = below
        return list(found.values())

    cgroups.end(command)
    hunt = TreeKiller(find, owns)
    while hunt.step() and not hunt.is_over:
        select.select([], [], [], hunt.pause_s)
    return hunt.message


def end_adopted(spare: AbstractSet[int]) -> bool:
    """Try once to end the orphans that this agent adopted from pairs that it forked. True when there was none.

    They are its descendants but for ``spare`` and what is below those.
    """
    me = os.getpid()

    def find(everything: List[processes.Process]) -> List[processes.Process]:
        return processes.only_descendants(everything, me, spare)

    return not TreeKiller(find, lambda one: processes.is_below(one, me, spare)).step()
