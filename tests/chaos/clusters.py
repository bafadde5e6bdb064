"""Schedules of faults for gangs on a cluster engine: what is drawn from a seed, what is done, and what must hold at the end.

``Trouble`` has the faults of one engine. Everything else is the same for all engines.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from chaos.gangs import ChaosGang
from distflow.lifecycle.states import Reason, State
from distflow.state.record import GroupRecord
from distflow.testing.waiting import wait_until
from scenarios.conftest import Cli

__all__ = ["ClusterGang", "Schedule", "Trouble", "draw_schedule"]


class Trouble(Protocol):
    """What can happen to an engine and its allocations."""

    harmless: Sequence[str]
    """Faults that no gang may notice."""
    ends: Mapping[str, tuple[Sequence[str], Sequence[Reason]]]
    """Faults that end an allocation, each with possible statuses of the workflow, and possible reasons of the first cause."""

    def allocations(self) -> list[str]:
        """Return the ids of all allocations that wait or exist."""

    def inject(self, fault: str, allocation: str) -> None:
        """Inject a harmless fault (``allocation`` is then empty), or one that ends this allocation."""

    def repair(self) -> None:
        """Undo all faults that last, and wait until the engine works again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """What happens to one gang."""

    seed: int
    tasks: int
    faults: tuple[tuple[float, str], ...]
    """Harmless faults, each with the seconds since the submission."""
    end: str
    """``complete``, ``exit``, ``rank``, ``cancel``, or one of the engine's."""
    delay_s: float
    """Seconds from the start of the allocation, or of the tasks, to the end."""
    victim: int
    code: int
    is_retried: bool


def draw_schedule(seed: int, *, harmless: Sequence[str], ends: Sequence[str], most_tasks: int) -> Schedule:
    """Return the schedule of a seed."""
    dice = random.Random(seed)
    tasks = dice.randint(1, most_tasks)
    end = dice.choice(("complete", "exit", "rank", "cancel", *ends))
    kinds = ("supervisor", "supervisor", *harmless)
    return Schedule(
        seed=seed, tasks=tasks, end=end, delay_s=dice.choice([0.0, 0.5, 1.0, 3.0]) * dice.random(),
        faults=tuple(sorted((round(dice.uniform(0.0, 6.0), 1), dice.choice(kinds)) for _ in range(dice.randint(0, 3)))),
        victim=dice.randrange(tasks), code=dice.randint(3, 9), is_retried=end in ("exit", "rank") and dice.random() < 0.5,
    )  # fmt: skip


class ClusterGang(ChaosGang):
    """One gang on an engine."""

    end_s = 120.0

    def __init__(self, cli: Cli, trouble: Trouble, schedule: Schedule) -> None:
        """Submit nothing yet."""
        super().__init__(cli, schedule.seed, schedule)
        self.trouble = trouble
        self.schedule = schedule

    @property
    def group(self) -> GroupRecord:
        """Its only group."""
        return self.record.groups[0]

    def run(self) -> list[str]:
        """Submit it, inject all faults, and wait for its end. Returns what is wrong, in words."""
        self._submit()
        faults = threading.Thread(target=self._inject_harmless)
        faults.start()
        try:
            self._inject_end()
            faults.join()
            self.trouble.repair()
            self._await(self._is_over, "the workflow is over")
        finally:
            (self.folder / "go").touch()
            faults.join()
            self.trouble.repair()
        return list(self._wrong())

    def _submit(self) -> None:
        one = self.schedule
        spec = self.spec(one.tasks, is_retried=one.is_retried) + "  resources: {default: {cpu: 2}}\n"
        self._name = self.cli.submit(self.cli.spec(spec, f"chaos-{one.seed}.yaml"))

    def _inject_harmless(self) -> None:
        clock, elapsed_s = threading.Event(), 0.0
        for at_s, fault in self.schedule.faults:
            clock.wait(max(0.0, at_s - elapsed_s))
            elapsed_s = at_s
            if fault == "supervisor":
                pid = self.cli.supervisor()
                if pid is not None:
                    _kill(pid)
            else:
                self.trouble.inject(fault, "")

    def _inject_end(self) -> None:
        one, wait = self.schedule, threading.Event().wait
        if one.end == "cancel":
            wait(one.delay_s)
            self.cli.run("workflow", "cancel", self._name)
        elif one.end in ("complete", "exit", "rank"):
            self._await(lambda: self._all_run(0), "all tasks run")
            wait(one.delay_s)
            if one.end == "complete":
                (self.folder / "go").touch()
            elif one.end == "exit":
                self.exit(one.victim, one.code)
            else:
                _kill(self._rank_pid())
            if one.is_retried:
                self._await(lambda: self._all_run(1), "its second attempt runs")
                (self.folder / "go").touch()
        else:
            self._await(lambda: bool(self.trouble.allocations()), "there is an allocation")
            wait(one.delay_s)
            # It may have been refused during the delay: then there is none until it is requested again.
            (allocation,) = wait_until(self.trouble.allocations, 60, "there is an allocation")
            self.trouble.inject(one.end, allocation)
            # An allocation that ended before its tasks were leased is requested again.
            self._await(lambda: self._is_over() or self._has_another(allocation), "the end of the allocation has an effect")
            (self.folder / "go").touch()

    def _rank_pid(self) -> int:
        """The id of the victim's process. In a container, the process itself knows another one."""
        name = f"t{self.schedule.victim}"
        pid, lock = (self.folder / f"{name}.pid").read_text().strip(), os.stat(self.folder / f"{name}.lock")
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                numbers = re.search(r"^NSpid:(.*)", (folder / "status").read_text(), re.MULTILINE)
                if numbers and numbers[1].split()[-1] == pid and os.path.samestat(os.stat(folder / "fd/9"), lock):
                    return int(folder.name)
        raise AssertionError(f"{name} has no process {pid}")

    def _has_another(self, allocation: str) -> bool:
        self.trouble.repair()
        tasks = self.group.tasks
        return all(one.state is State.RUNNING and not (one.node or "").endswith(f"@{allocation}") for one in tasks)

    def _all_run(self, attempt: int) -> bool:
        group = self.group
        return (
            group.attempt == attempt
            and all(task.state is State.RUNNING for task in group.tasks)
            and all((self.folder / f"t{number}.pid").exists() for number in range(self.schedule.tasks))
        )

    def _is_over(self) -> bool:
        record = self.record
        return record.state.is_final and all(
            task.log_complete and task.orphan is None for group in record.groups for task in group.attempts
        )

    # What must hold.

    def _wrong(self) -> Iterator[str]:
        one, record, group = self.schedule, self.record, self.group
        if (self.folder / "twice").exists():
            yield f"ran twice at once: {(self.folder / 'twice').read_text().split()}"
        statuses, reasons = self._expected()
        # An allocation that ends before its tasks start is requested again.
        if record.status not in statuses and not (record.status == "COMPLETED" and one.end in self.trouble.ends):
            yield f"is {record.status}, and not {' or '.join(statuses)}: {group.message}"
        if group.cause is not None and group.cause.reason not in reasons:
            yield f"the first cause is {group.cause}, and not one of {[reason.value for reason in reasons]}"
        if group.cause is not None and one.end in ("exit", "rank") and group.cause.task != f"t{one.victim}":
            yield f"the first cause is {group.cause.task}, and not t{one.victim}"
        if group.cause is not None and one.end == "exit" and group.cause.exit_code != one.code:
            yield f"the exit code is {group.cause.exit_code}, and not {one.code}"
        yield from self._lost_output()
        try:
            # After a restart of its API server, Kubernetes may take more than a minute to delete the pods of a deleted owner.
            wait_until(lambda: not self.trouble.allocations(), 180)
        except TimeoutError:
            yield f"left the allocations {self.trouble.allocations()}"

    def _expected(self) -> tuple[Sequence[str], Sequence[Reason]]:
        one = self.schedule
        if one.end == "complete" or one.is_retried:
            return ("COMPLETED",), ()
        if one.end == "cancel":
            return ("FAILED_CANCELED",), (Reason.CANCELED,)
        if one.end in ("exit", "rank"):
            return ("FAILED",), (Reason.EXIT_CODE if one.end == "exit" else Reason.SIGNAL,)
        return self.trouble.ends[one.end]

    def _lost_output(self) -> Iterator[str]:
        """The lines of each task are there once, in their order; to the last one, if the task ended by itself."""
        for task in self.group.attempts:
            arguments = ("--task", task.name, "--retry-id", str(task.attempt))
            lines = [line.rpartition("] ")[2] for line in self.cli.logs(self._name, *arguments).splitlines()]
            is_complete = "late" in lines[-1:]
            counted = lines[:-1] if is_complete else lines
            if counted != [f"line {number}" for number in range(len(counted))]:
                yield f"lines of {task.name} are lost: {lines[:3]} … {lines[-3:]}"
            if task.state is State.COMPLETED and not is_complete:
                yield f"the last lines of {task.name} are lost: {lines[-3:]}"


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
