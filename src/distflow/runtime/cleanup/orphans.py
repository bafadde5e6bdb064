"""Attempts whose runner and keeper have both died: kill their remaining processes, and record their end."""

from __future__ import annotations

import contextlib
import os
import select

from distflow.protocol.ends import EndReason
from distflow.protocol.light_typing import AbstractSet, List, Optional
from distflow.runtime import processes
from distflow.runtime.files import attempt_files, attempts, log_files, records
from distflow.runtime.guard import process_tree
from distflow.runtime.guard.process_tree import TreeKiller
from distflow.runtime.wire import Json

__all__ = ["is_guarded", "is_pair_alive", "kill_adopted_orphans", "may_live", "settle"]


def is_pair_alive(state: Json) -> bool:
    """Return whether the runner or keeper that is named in ``runner.json`` is alive on this machine."""
    if state.get("boot_id") != processes.boot_id():
        return False
    pair = [state.get("runner") or {}, state.get("keeper") or {}]
    return any(processes.is_alive(int(one.get("pid", 0)), int(one.get("start", 0))) for one in pair)


def is_guarded(directory: str) -> bool:
    """Return whether the attempt's runner or keeper is alive. Both may live for a moment after they recorded the end."""
    state = records.read_state(directory)
    return (state is not None and is_pair_alive(state)) or attempts.is_reachable(directory)


def may_live(directory: str) -> bool:
    """Return whether a runner or keeper of the attempt is alive here, or may be on another machine that shares the root."""
    if is_guarded(directory):
        return True
    state = records.read_state(directory)
    return state is not None and state.get("host") not in (None, os.uname().nodename) and records.read_end(directory) is None


def settle(root: str, attempt: str, stopped: Optional[Json] = None) -> Json:
    """Kill the remaining processes of an attempt of this machine whose runner and keeper are gone, and record its end.

    Does nothing if one of them is alive on this machine, or if an end is recorded. If several machines share the root, the
    caller excludes attempts of the others (``may_live``). Returns an empty answer.

    If the attempt's directory or state is missing, its processes are found by their environment, and nothing is recorded.
    ``stopped`` has the cause (``why``) and the time (``stopped_at``) of a stop request that may not be recorded yet.
    """
    directory = attempts.directory_of(root, attempt)
    try:
        lock = attempts.lock_task(directory, wait=True)
    except FileNotFoundError:
        _kill_remaining(attempt, {})
        return {}
    try:
        state = records.read_state(directory)
        if state is None and not attempts.is_reachable(directory):
            _kill_remaining(attempt, {})
        if state is None or records.read_end(directory) is not None or is_pair_alive(state):
            return {}
        reason = EndReason.BOTH_DIED
        message = "the task's runner and keeper were killed, perhaps because of a lack of memory, or by a user"
        if state.get("boot_id") != processes.boot_id():
            reason, message = EndReason.REBOOTED, "the node was rebooted while the task was on it"
        else:
            if stopped is not None and state.get("stopped_at") is None and not state.get("exit"):
                state.update(stopped)
            stop = records.stop_reason(state)
            if stop is not None:
                reason, message = stop, "the task's runner and keeper were killed while it was being stopped"
            message = _kill_remaining(attempt, state) or message
        process_tree.remove_cgroup(state.get("command") or {})
        dir_fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        attempt_files.remove_secrets(directory)
        if attempt_files.uses_secrets(directory):
            # Without the processes that had the secrets, the error file cannot be masked, so it is removed.
            with contextlib.suppress(OSError):
                os.unlink(os.path.join(directory, "error.json"))
        error = records.read_error(directory)
        fields = dict(state.get("exit") or {}, message=message, output_bytes=log_files.end_of(directory), error=error)
        end = records.make_end(state, reason, **fields)
        os.fsync(records.write_end(dir_fd, -1, end))
    finally:
        os.close(lock)
    return {}


def _kill_remaining(attempt: str, state: Json) -> str:
    """Kill all processes in the attempt's cgroup, with its name in their environment, or in its command's session.

    Their descendants are killed, too. Returns a message about processes that cannot be killed, or an empty string.
    """
    command = state.get("command") or {}
    session, start = int(command.get("pid") or 0), int(command.get("start") or 0)
    group = process_tree.cgroup_name(command)
    spare = {os.getpid(), os.getppid()}

    def owns(process: processes.Process) -> bool:
        if process.pid in spare:
            return False
        if session > 1 and process.sid == session and process.start >= start:
            # If a living leader has another start time, the command's id was reused, and so was the id of its session.
            leader = processes.read_process(session)
            if leader is None or leader.start == start:
                return True
        return (bool(group) and process_tree.cgroup_of(process.pid) == group) or processes.has_variable(
            process.pid, "DISTFLOW_ATTEMPT=" + attempt
        )

    def find(everything: List[processes.Process]) -> List[processes.Process]:
        found = {process.pid: process for process in everything if owns(process)}
        for process in list(found.values()):
            for below in processes.only_descendants(everything, process.pid, spare):
                found[below.pid] = below
        return list(found.values())

    process_tree.kill_cgroup(command)
    killer = TreeKiller(find, owns)
    while killer.step() and not killer.is_over:
        select.select([], [], [], killer.pause_s)
    return killer.message


def kill_adopted_orphans(spare: AbstractSet[int]) -> bool:
    """Try once to kill the orphans that this agent adopted from pairs that it forked. Returns True if there were none.

    The orphans are all descendants of the agent except for ``spare`` and their descendants.
    """
    me = os.getpid()

    def find(everything: List[processes.Process]) -> List[processes.Process]:
        return processes.only_descendants(everything, me, spare)

    return not TreeKiller(find, lambda one: processes.is_below(one, me, spare)).step()
