"""Random schedules of faults for a gang on SSH hosts, and the checks after each schedule."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import random
import signal
import subprocess
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chaos.gangs import ChaosGang
from distflow.lifecycle.states import Reason, State
from distflow.runtime.files.root_directory import PRIVATE
from distflow.state.record import Cause, TaskRecord
from distflow.testing.kernel import NetnsHost
from distflow.testing.sshd import Sshd
from scenarios.lab import Lab

__all__ = ["ENDS", "HARMLESS", "HARMLESS_WITH_CUTS", "HostGang", "HostSchedule", "draw_host_schedule", "held_leases"]

HARMLESS = ("supervisor", "supervisor", "agent", "agent", "command line", "freeze", "sshd")
"""Faults that must not affect a task."""
HARMLESS_WITH_CUTS = tuple("cut" if fault == "freeze" else fault for fault in HARMLESS)
"""The same with ``cut`` in place of ``freeze``, for hosts whose links can be cut."""
ENDS = ("complete", "exit", "rank", "runner", "keeper", "host", "lost")
"""How a gang ends: it completes, a task exits with a code, a process or all processes of a host are killed, or it is lost."""

_HOST_LOCK = threading.Lock()
"""Only one gang at a time restarts a host or cuts it off, because a restart waits until the server answers."""

_ESCAPE = """
        # A daemon that tries to escape: it has its own session and no environment. It holds the lock.
        (env -i setsid sh -c ': FOLDER; while sleep 5; do :; done' &)
"""
_GUARDS = (Reason.INTERNAL,)
_REASONS = {
    "exit": (Reason.EXIT_CODE,),
    "rank": (Reason.SIGNAL,),
    "runner": _GUARDS,
    "keeper": _GUARDS,
    "host": _GUARDS,
    "lost": (Reason.NODE_LOST,),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class HostSchedule:
    """The faults and the end of one gang."""

    seed: int
    tasks: int
    faults: tuple[tuple[str, float], ...]
    """Harmless faults in their order, each with its host (0 to 1: first to last)."""
    end: str
    victim: int
    """The number of the task that ``end`` concerns."""
    code: int
    """The exit code for ``exit``."""
    is_retried: bool
    """Whether the task has a second attempt, which completes."""


def draw_host_schedule(
    seed: int, *, most_tasks: int = 3, ends: Sequence[str] = ENDS, harmless: Sequence[str] = HARMLESS
) -> HostSchedule:
    """Return the schedule of a seed."""
    dice = random.Random(seed)
    tasks, end = dice.randint(1, most_tasks), dice.choice(ends)
    return HostSchedule(
        seed=seed, tasks=tasks, end=end, victim=dice.randrange(tasks), code=dice.randint(3, 9),
        faults=tuple((dice.choice(harmless), dice.random()) for _ in range(dice.randint(0, 3))),
        is_retried=end in ("exit", "rank") and dice.random() < 0.5,
    )  # fmt: skip


class HostGang(ChaosGang):
    """One gang and its faults."""

    def __init__(self, lab: Lab, schedule: HostSchedule, links: Mapping[str, NetnsHost] | None = None) -> None:
        """Submit nothing yet. With ``links``, hosts can be cut off, and a lost host is cut off instead of frozen."""
        super().__init__(lab.cli, schedule.seed, schedule)
        self.lab = lab
        self._links = links or {}
        self.schedule = schedule
        self._frozen: set[str] = set()
        self._cut: set[str] = set()
        self._waiting: subprocess.Popen[str] | None = None

    def run(self) -> list[str]:
        """Submit the gang, inject all faults, and wait for its end. Return a description of each error."""
        self.submit()
        try:
            self._await(lambda: self._all_run(0), "all tasks run")
            for fault, which in self.schedule.faults:
                self._fault(fault, which)
            self._end()
            self._await(self._is_over, f"{self._name} is over")
        finally:
            self._bring_back()
            self._leave_command_line()
        return list(self._errors())

    def submit(self) -> None:
        """Submit the gang with a command line that waits for its end."""
        (self.folder / "spec.yaml").write_text(
            self.spec(self.schedule.tasks, is_retried=self.schedule.is_retried, first=_ESCAPE)
        )
        self._waiting = self.lab.cli.start("workflow", "submit", str(self.folder / "spec.yaml"), "--wait")
        assert self._waiting.stdout is not None
        self._name = self._waiting.stdout.readline().strip()
        if not self._name:
            raise AssertionError(self._waiting.communicate()[1])

    # Faults.

    def _fault(self, fault: str, which: float) -> None:
        names = sorted(self.lab.servers)
        name = names[int(which * len(names))]
        if fault == "supervisor":
            _kill([pid for pid in (self.lab.cli.supervisor(),) if pid is not None])
        elif fault == "agent":
            _kill(self._processes(name, "df-agent"))
        elif fault == "command line":
            self._leave_command_line()
        elif fault == "freeze":
            # A host stays frozen or cut off during the next fault.
            self._freeze(name)
        elif fault == "cut":
            self._cut_off(name)
        else:
            self._bring_back()
            with self._restarting(name) as server:
                server.restart()

    def _end(self) -> None:
        schedule, task = self.schedule, self._task(0)
        node = task.node or ""
        if schedule.end == "lost":
            self._bring_back()
            (self._cut_off if self._links else self._freeze)(node)
            self._await(lambda: self._task(0).reason is Reason.NODE_LOST, "the host is given up")
            self._bring_back()
            return
        state = json.loads((self.node_folder(task) / "runner.json").read_text().rstrip("\0 "))
        if schedule.end == "complete":
            (self.folder / "go").touch()
        elif schedule.end == "exit":
            self.exit(schedule.victim, schedule.code)
        elif schedule.end == "host":
            # Like a restart of the host, without its kernel: kill all processes of the task and the agent at once.
            with self._restarting(node) as server:
                server.stop()
                _kill([int(state[role]["pid"]) for role in ("runner", "keeper", "command")])
                _kill(self._processes(node, "df-agent"))
                server.start()
        else:
            _kill([int(state["command" if schedule.end == "rank" else schedule.end]["pid"])])
        self._bring_back()
        if schedule.is_retried:
            self._await(lambda: self._all_run(1), "the second attempt runs")
            (self.folder / "go").touch()

    @contextlib.contextmanager
    def _restarting(self, name: str) -> Iterator[Sshd]:
        with _HOST_LOCK:
            if name in self._links:
                self._links[name].heal()
            yield self.lab.servers[name]

    def _freeze(self, name: str) -> None:
        self._frozen.add(name)
        self.lab.servers[name].freeze()

    def _cut_off(self, name: str) -> None:
        self._cut.add(name)
        with _HOST_LOCK:
            self._links[name].cut()

    def _bring_back(self) -> None:
        while self._frozen:
            self.lab.servers[self._frozen.pop()].thaw()
        while self._cut:
            self._links[self._cut.pop()].heal()

    def _leave_command_line(self) -> None:
        process, self._waiting = self._waiting, None
        if process is not None:
            process.kill()
            process.communicate()

    # The state of the gang.

    def root(self, node: str) -> Path:
        """The configured root of a host."""
        return self.lab.cli.folder / node

    def node_folder(self, task: TaskRecord) -> Path:
        """The directory of an attempt on its node."""
        return self.root(task.node or "") / PRIVATE / self.record.uuid / "g" / task.name / str(task.attempt)

    def _task(self, attempt: int) -> TaskRecord:
        name = f"t{self.schedule.victim}"
        return next(one for one in self.record.groups[0].attempts if (one.name, one.attempt) == (name, attempt))

    def _all_run(self, attempt: int) -> bool:
        group = self.record.groups[0]
        return group.attempt == attempt and all(task.state is State.RUNNING for task in group.tasks)

    def _is_over(self) -> bool:
        record = self.record
        orphans = [task for group in record.groups for task in group.attempts if task.orphan is not None]
        return record.state.is_final and not orphans and all(task.log_complete for task in record.groups[0].attempts)

    def _processes(self, node: str, name: str) -> list[int]:
        root = str(self.root(node))
        return [pid for pid, command in self.lab.cli.processes() if root in command.split() and _comm(pid) == name]

    # Checks after the end.

    def _errors(self) -> Iterator[str]:
        group = self.record.groups[0]
        if (self.folder / "twice").exists():
            yield f"ran twice at once: {(self.folder / 'twice').read_text().split()}"
        for task in group.attempts:
            yield from self._exit_code_errors(task)
        expected = State.COMPLETED if self.schedule.end == "complete" or self.schedule.is_retried else State.FAILED
        if group.state is not expected:
            yield f"is {group.state.value}, and not {expected.value}: {group.message}"
        causes = (*group.earlier_causes, *([group.cause] if group.cause else []))
        if len(causes) != int(self.schedule.end != "complete"):
            yield f"has the causes {causes}"
        yield from (error for cause in causes for error in self._cause_errors(cause))
        remaining = [pid for pid, command in self.lab.cli.processes() if str(self.folder) in command]
        if remaining:
            yield f"left the processes {remaining}"

    def _exit_code_errors(self, task: TaskRecord) -> Iterator[str]:
        """Check that the record has the exit code, unless the host was given up and is no longer queried."""
        end: dict[str, Any] = json.loads((self.node_folder(task) / "exit.json").read_text())
        if task.reason is Reason.NODE_LOST:
            return
        if task.end is None or (task.end.exit_code, task.end.signal) != (end["exit_code"], end["signal"]):
            yield f"{task.name} ended with {end}, and the record says {task.end}"

    def _cause_errors(self, cause: Cause) -> Iterator[str]:
        schedule = self.schedule
        code = schedule.code if schedule.end == "exit" else None
        number = int(signal.SIGKILL) if schedule.end == "rank" else None
        found = (cause.task, cause.reason in _REASONS[schedule.end])
        if found != (f"t{schedule.victim}", True) or (code and cause.exit_code != code) or (number and cause.signal != number):
            yield f"t{schedule.victim} should end by `{schedule.end}` ({code}), and the recorded cause is {cause}"


def held_leases(lab: Lab) -> list[str]:
    """Return the lease files that a process still holds."""
    held = []
    for path in sorted(lab.cli.folder.glob("*-leases/*.lock")):
        with path.open() as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                held.append(str(path))
    return held


def _comm(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text().strip()
    return ""


def _kill(pids: list[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
