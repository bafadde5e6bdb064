"""Schedules against real hosts: a gang behind real sshds, processes that are killed, and their real end."""

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

__all__ = ["CUTTING", "ENDS", "HARMLESS", "Deed", "Gang", "draw_deed", "held_leases"]

HARMLESS = ("supervisor", "supervisor", "agent", "agent", "command line", "freeze", "sshd")
"""What no task may notice."""
CUTTING = tuple("cut" if fault == "freeze" else fault for fault in HARMLESS)
"""The same for hosts whose links can be cut."""
ENDS = ("complete", "exit", "rank", "runner", "keeper", "host", "lost")
"""How a gang ends: all of it well, a task with a code of its own, by what is killed, or by a host that does not come back."""

_ONE_AT_A_TIME = threading.Lock()
"""Of several gangs at once, one restarts a host or cuts it off: a server that restarts must be seen to answer."""

_ESCAPE = """
        # A child that tries to escape: orphaned, in a session of its own, without an environment. It keeps the lock.
        (env -i setsid sh -c ': FOLDER; while sleep 5; do :; done' &)
"""
_WATCHERS = (Reason.INTERNAL,)
_REASONS = {
    "exit": (Reason.EXIT_CODE,),
    "rank": (Reason.SIGNAL,),
    "runner": _WATCHERS,
    "keeper": _WATCHERS,
    "host": _WATCHERS,
    "lost": (Reason.NODE_LOST,),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Deed:
    """What is done to one gang."""

    seed: int
    tasks: int
    faults: tuple[tuple[str, float], ...]
    """Harmless ones with their victims (0 to 1: first to last), in their order."""
    end: str
    victim: int
    """The task that it happens to."""
    code: int
    again: bool
    """The spec wants another attempt then, and that one ends well."""


def draw_deed(seed: int, *, most_tasks: int = 3, ends: Sequence[str] = ENDS, harmless: Sequence[str] = HARMLESS) -> Deed:
    """Return what a seed does."""
    dice = random.Random(seed)
    tasks, end = dice.randint(1, most_tasks), dice.choice(ends)
    return Deed(
        seed=seed, tasks=tasks, end=end, victim=dice.randrange(tasks), code=dice.randint(3, 9),
        faults=tuple((dice.choice(harmless), dice.random()) for _ in range(dice.randint(0, 3))),
        again=end in ("exit", "rank") and dice.random() < 0.5,
    )  # fmt: skip


class Gang(ChaosGang):
    """One gang and what is done to it; of several at a time, each has a folder of its own."""

    def __init__(self, lab: Lab, deed: Deed, links: Mapping[str, NetnsHost] | None = None) -> None:
        """Take the hosts; nothing is submitted yet. With ``links``, a host can be cut off, and one that is lost is."""
        super().__init__(lab.cli, deed.seed, deed)
        self.lab = lab
        self._links = links or {}
        self.deed = deed
        self._frozen: set[str] = set()
        self._cut: set[str] = set()
        self._waiting: subprocess.Popen[str] | None = None

    def run(self) -> list[str]:
        """Submit it, do everything to it, wait for its end; return what is wrong, in words."""
        self.submit()
        try:
            self._await(lambda: self._all_run(0), "all of it runs")
            for fault, which in self.deed.faults:
                self._fault(fault, which)
            self._end()
            self._await(self._is_over, f"{self._name} is over")
        finally:
            self._bring_back()
            self._leave_command_line()
        return list(self._wrong())

    def submit(self) -> None:
        """Submit it with a command line that waits for its end."""
        (self.folder / "spec.yaml").write_text(self.spec(self.deed.tasks, is_retried=self.deed.again, first=_ESCAPE))
        self._waiting = self.lab.cli.start("workflow", "submit", str(self.folder / "spec.yaml"), "--wait")
        assert self._waiting.stdout is not None
        self._name = self._waiting.stdout.readline().strip()
        if not self._name:
            raise AssertionError(self._waiting.communicate()[1])

    # What is done to it.

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
            # Until after what comes next; a link that is cut, too.
            self._freeze(name)
        elif fault == "cut":
            self._cut_off(name)
        else:
            self._bring_back()
            with self._restarting(name) as server:
                server.restart()

    def _end(self) -> None:
        deed, task = self.deed, self._task(0)
        node = task.node or ""
        if deed.end == "lost":
            self._bring_back()
            (self._cut_off if self._links else self._freeze)(node)
            self._await(lambda: self._task(0).reason is Reason.NODE_LOST, "the host is given up")
            self._bring_back()
            return
        state = json.loads((self.node_folder(task) / "runner.json").read_text().rstrip("\0 "))
        if deed.end == "complete":
            (self.folder / "go").touch()
        elif deed.end == "exit":
            self.exit(deed.victim, deed.code)
        elif deed.end == "host":
            # As when the host restarts, except that the kernel keeps running: every process of the task and its agent at once.
            with self._restarting(node) as server:
                server.stop()
                _kill([int(state[who]["pid"]) for who in ("runner", "keeper", "command")])
                _kill(self._processes(node, "df-agent"))
                server.start()
        else:
            _kill([int(state["command" if deed.end == "rank" else deed.end]["pid"])])
        self._bring_back()
        if deed.again:
            self._await(lambda: self._all_run(1), "its second attempt runs")
            (self.folder / "go").touch()

    @contextlib.contextmanager
    def _restarting(self, name: str) -> Iterator[Sshd]:
        with _ONE_AT_A_TIME:
            if name in self._links:
                self._links[name].heal()
            yield self.lab.servers[name]

    def _freeze(self, name: str) -> None:
        self._frozen.add(name)
        self.lab.servers[name].freeze()

    def _cut_off(self, name: str) -> None:
        self._cut.add(name)
        with _ONE_AT_A_TIME:
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

    # What is known of it.

    def root(self, node: str) -> Path:
        """Where a host keeps what belongs to distflow."""
        return self.lab.cli.folder / node

    def node_folder(self, task: TaskRecord) -> Path:
        """Where its node keeps an attempt."""
        return self.root(task.node or "") / PRIVATE / self.record.uuid / "g" / task.name / str(task.attempt)

    def _task(self, attempt: int) -> TaskRecord:
        name = f"t{self.deed.victim}"
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

    # What must hold.

    def _wrong(self) -> Iterator[str]:
        group = self.record.groups[0]
        if (self.folder / "twice").exists():
            yield f"ran twice at once: {(self.folder / 'twice').read_text().split()}"
        for task in group.attempts:
            yield from self._misread(task)
        expected = State.COMPLETED if self.deed.end == "complete" or self.deed.again else State.FAILED
        if group.state is not expected:
            yield f"is {group.state.value}, and not {expected.value}: {group.message}"
        causes = (*group.earlier_causes, *([group.cause] if group.cause else []))
        if len(causes) != int(self.deed.end != "complete"):
            yield f"has the causes {causes}"
        yield from (words for cause in causes for words in self._misjudged(cause))
        left = [pid for pid, command in self.lab.cli.processes() if str(self.folder) in command]
        if left:
            yield f"left the processes {left}"

    def _misread(self, task: TaskRecord) -> Iterator[str]:
        """Every exit code is in the record, except those on a host that was given up, which is no longer asked."""
        end: dict[str, Any] = json.loads((self.node_folder(task) / "exit.json").read_text())
        if task.reason is Reason.NODE_LOST:
            return
        if task.end is None or (task.end.exit_code, task.end.signal) != (end["exit_code"], end["signal"]):
            yield f"{task.name} ended with {end}, and the record says {task.end}"

    def _misjudged(self, cause: Cause) -> Iterator[str]:
        deed = self.deed
        code, number = (deed.code if deed.end == "exit" else None), (int(signal.SIGKILL) if deed.end == "rank" else None)
        named = (cause.task, cause.reason in _REASONS[deed.end])
        if named != (f"t{deed.victim}", True) or (code and cause.exit_code != code) or (number and cause.signal != number):
            yield f"t{deed.victim} was to end by `{deed.end}` ({code}), and the verdict is {cause}"


def held_leases(lab: Lab) -> list[str]:
    """The lease files that somebody still holds."""
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
