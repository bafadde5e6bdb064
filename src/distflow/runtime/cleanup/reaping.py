"""Find and kill leftovers: processes and containers of ended attempts of any workflow.

A process is a leftover if it has an attempt's name in its environment (the *mark*), or belongs to the session or the cgroup of
an attempt's command, while runner and keeper of that attempt are gone. Only leftovers of attempts in this root are killed;
every root is reaped separately.
"""

from __future__ import annotations

import os
import select
import time

from distflow.protocol.light_typing import Dict, List, NamedTuple, Optional, Tuple
from distflow.runtime import processes
from distflow.runtime.cleanup import orphans
from distflow.runtime.clock import now
from distflow.runtime.files import attempts, records, root_directory
from distflow.runtime.guard import containers, process_tree
from distflow.runtime.guard.process_tree import TreeKiller
from distflow.runtime.leases import gpu_users
from distflow.runtime.probes.facts import user_name
from distflow.runtime.processes import Process
from distflow.runtime.wire import Json, OpError

__all__ = ["reap"]

_LIMIT_S = 30.0
_GUARDS = ("df-runner", "df-keeper")
_SLACK_S = 2.0
"""Tolerance between the times of a process and of a record, because both are imprecise."""


class _Leftover(NamedTuple):
    """Why a process is a leftover."""

    attempt: str
    why: str
    is_ours: bool
    """Whether it may be killed: it belongs to this root and this user."""


def reap(root: str, request: Json) -> Json:
    """Kill this root's leftovers, record the ends of attempts whose runner and keeper are gone, and report both.

    ``dry_run`` only reports.
    """
    leftovers = _Leftovers(root)
    found = leftovers.find()
    found_containers = leftovers.containers()
    answer: Json = {
        "processes": _describe(found),
        "containers": [container for container, _ in found_containers],
        "settled": [],
        "left": [],
        "message": "",
    }
    if request.get("dry_run"):
        answer["settled"] = leftovers.unsettled()
        return answer
    for container, handle in found_containers:
        container["error"] = containers.remove(handle) if container["is_ours"] else None
    killer = TreeKiller(leftovers.to_kill, leftovers.is_ours)
    until = time.monotonic() + _LIMIT_S
    while killer.step() and not killer.is_over and time.monotonic() < until:
        select.select([], [], [], killer.pause_s)
    _await_removal(leftovers, [container for container, _ in found_containers if container["is_ours"]], until)
    answer["left"] = _describe([(process, leftover) for process, leftover in leftovers.find() if leftover.is_ours])
    if answer["left"]:
        answer["message"] = (
            killer.message or "a process does not end: it may hang in a driver, or in a file system that does not respond"
        )
    busy = {one["attempt"] for one in answer["left"]}
    for name in leftovers.unsettled():
        if name not in busy:
            orphans.settle(root, name)
            answer["settled"].append(name)
    process_tree.sweep_cgroups()
    return answer


def _await_removal(leftovers: _Leftovers, found_containers: List[Json], until: float) -> None:
    """Wait until the containers are gone, at most until ``until``. Set ``error`` of those that remain, and clear the others'.

    An engine refuses to remove a container that it is already removing. This is not an error.
    """
    left = found_containers
    while left:
        present = {container["name"] for container, _ in leftovers.containers()}
        left = [container for container in left if container["name"] in present]
        if not left or time.monotonic() >= until:
            break
        select.select([], [], [], 0.2)
    for container in found_containers:
        container["error"] = (container["error"] or "its container engine does not remove it") if container in left else None


class _Leftovers:
    """The attempts of one root, and the processes that belong to ended attempts."""

    def __init__(self, root: str) -> None:
        self._root = root
        self._boot = processes.boot_id()
        self._sessions: Dict[int, List[Tuple[str, Json]]] = {}
        self._cgroups: Dict[str, str] = {}
        self._engines: List[Tuple[str, Dict[str, str]]] = containers.engines()
        for workflow in attempts.workflows(root):
            for name, directory in attempts.list_attempts(root, workflow):
                self._add(name, records.read_state(directory) or {})
        ancestors, parent = [os.getpid()], processes.read_process(os.getpid())
        while parent is not None and parent.ppid > 1:
            ancestors.append(parent.ppid)
            parent = processes.read_process(parent.ppid)
        self._ancestors = frozenset(ancestors)
        """This process and its ancestors."""

    def _add(self, name: str, state: Json) -> None:
        session = int((state.get("command") or {}).get("pid") or 0)
        if session > 1 and state.get("boot_id") == self._boot:
            self._sessions.setdefault(session, []).append((name, state))
        group = process_tree.cgroup_name(state.get("command") or {})
        if group and state.get("boot_id") == self._boot:
            self._cgroups[group] = name
        container = state.get("container")
        if container and (container["program"], container["env"]) not in self._engines:
            self._engines.append((container["program"], container["env"]))

    def unsettled(self) -> List[str]:
        """Return this machine's attempts whose runner and keeper are gone and that have no recorded end.

        Several machines may share a root over NFS.
        """
        found = []
        for workflow in attempts.workflows(self._root):
            for name, directory in attempts.list_attempts(self._root, workflow):
                state = records.read_state(directory)
                if state is None or (state.get("boot_id") != self._boot and state.get("host") != os.uname().nodename):
                    continue
                # In this order, because runner and keeper exit only after the end was recorded.
                if not orphans.is_guarded(directory) and records.read_end(directory) is None:
                    found.append(name)
        return found

    def find(self, everything: Optional[List[Process]] = None) -> List[Tuple[Process, _Leftover]]:
        """Return every living leftover, including leftovers that may not be killed.

        ``everything`` are the processes to check, by default all current ones.
        """
        everything = list(processes.list_processes()) if everything is None else everything
        found = {}
        for process in everything:
            if not process.is_alive:
                continue
            leftover = self.explain(process)
            if leftover is not None:
                found[process.pid] = (process, leftover)
        for process, leftover in list(found.values()):
            if leftover.is_ours:
                for below in processes.only_descendants(everything, process.pid, self._ancestors):
                    if below.pid not in found and not _is_guarded(below):
                        found[below.pid] = (below, leftover)
        return [found[pid] for pid in sorted(found)]

    def to_kill(self, everything: List[Process]) -> List[Process]:
        """Return the processes to kill: this root's leftovers and their descendants."""
        return [process for process, leftover in self.find(everything) if leftover.is_ours]

    def is_ours(self, process: Process) -> bool:
        """Return whether this process is a leftover that must be killed."""
        leftover = self.explain(process)
        return leftover is not None and leftover.is_ours

    def explain(self, process: Process) -> Optional[_Leftover]:
        """Return why a process is a leftover; None if it is not one."""
        if process.pid in self._ancestors or process.pid <= 1:
            return None
        leftover = self._by_mark(process) or self._by_session(process) or self._by_cgroup(process)
        return None if leftover is None or _is_guarded(process) else leftover

    def _by_mark(self, process: Process) -> Optional[_Leftover]:
        name = processes.attempt_of(process.pid)
        if name is None:
            return None
        try:
            expected = attempts.directory_of(self._root, name)
        except OpError:
            return None  # a mark that distflow did not set
        directory = processes.variable_of(process.pid, "DISTFLOW_ATTEMPT_DIR") or expected
        if not directory.endswith("/" + name):
            directory = expected
        if orphans.is_guarded(directory):
            return None
        root = directory[: -len(name) - 1]
        if os.path.realpath(root) not in root_directory.roots(self._root):
            return _Leftover(name, "it belongs to another root, {}".format(root), False)
        why = _why(directory)
        try:
            return _Leftover(name, why, os.stat(directory).st_uid == os.getuid())
        except OSError:
            return _Leftover(name, why, _owner(process.pid) == os.getuid())  # the directory is gone

    def _by_session(self, process: Process) -> Optional[_Leftover]:
        for name, state in self._sessions.get(process.sid, ()):
            start = int(state["command"].get("start") or 0)
            leader = processes.read_process(process.sid)
            if process.start < start or (leader is not None and leader.start != start):
                continue  # the command's id was reused, and so was the id of its session
            directory = attempts.directory_of(self._root, name)
            if not os.path.isdir(directory) or orphans.is_guarded(directory):
                continue
            end = records.read_end(directory)
            # The session's id may be reused after the recorded end, so a later process may not belong to the attempt.
            if end is not None and processes.started_at(process) > float(end["ended_at"]) + _SLACK_S:
                continue
            return _Leftover(name, _why(directory), _owner(process.pid) == os.getuid())
        return None

    def _by_cgroup(self, process: Process) -> Optional[_Leftover]:
        name = self._cgroups.get(process_tree.cgroup_of(process.pid)) if self._cgroups else None
        if name is None:
            return None
        directory = attempts.directory_of(self._root, name)
        if not os.path.isdir(directory) or orphans.is_guarded(directory):
            return None
        return _Leftover(name, _why(directory), _owner(process.pid) == os.getuid())

    def containers(self) -> List[Tuple[Json, Json]]:
        """Return every container of an ended attempt, and the data that ``containers.remove`` needs."""
        found: Dict[str, Tuple[Json, Json]] = {}
        for program, env in self._engines:
            for container in containers.labeled(program, env):
                try:
                    expected = attempts.directory_of(self._root, container["attempt"])
                except OpError:
                    continue
                if orphans.is_guarded(expected):
                    continue
                is_ours = os.path.realpath(container["cwd"]) == os.path.join(expected, "work")
                directory = os.path.dirname(container["cwd"])
                if not is_ours and orphans.is_guarded(directory):
                    continue
                why = _why(expected) if is_ours else "its attempt belongs to another root, in {}".format(directory)
                shown = {
                    "name": container["name"], "program": os.path.basename(program), "attempt": container["attempt"],
                    "state": container["state"], "why": why, "is_ours": is_ours, "error": None,
                }  # fmt: skip
                found[container["id"]] = (shown, {"program": program, "name": container["name"], "env": env})
        return [found[one] for one in sorted(found)]


def _is_guarded(process: Process) -> bool:
    """Return whether a process is a runner or keeper of this user, or descends from one."""
    current: Optional[Process] = process
    for _ in range(64):
        if current is None:
            return False
        if processes.name_of(current.pid) in _GUARDS and _owner(current.pid) == os.getuid():
            return True
        current = processes.read_process(current.ppid) if current.ppid > 1 else None
    return False


def _why(directory: str) -> str:
    if not os.path.isdir(directory):
        return "the attempt's directory is gone"
    end = records.read_end(directory)
    if end is None:
        return "the attempt's runner and keeper are gone"
    return "the attempt has ended ({})".format(end.get("reason"))


def _owner(pid: int) -> Optional[int]:
    try:
        return os.stat("/proc/{}".format(pid)).st_uid
    except OSError:
        return None


def _describe(found: List[Tuple[Process, _Leftover]]) -> List[Json]:
    gpus: Dict[int, List[int]] = {}
    for one in gpu_users.list_gpu_users() if found else []:
        gpus.setdefault(int(str(one["pid"])), []).append(int(str(one["gpu"])))
    rows = []
    for process, leftover in found:
        owner = _owner(process.pid)
        rows.append({
            "pid": process.pid, "name": processes.name_of(process.pid), "user": "" if owner is None else user_name(owner),
            "attempt": leftover.attempt, "age_s": max(0.0, round(now() - processes.started_at(process), 1)),
            "gpus": gpus.get(process.pid, []), "why": leftover.why, "is_ours": leftover.is_ours,
        })  # fmt: skip
    return rows
