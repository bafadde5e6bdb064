"""Random schedules of faults for gangs on a cluster engine, and the checks after each schedule.

``FaultInjector`` has the faults of one engine. Everything else is the same for all engines.
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

__all__ = ["ClusterGang", "ClusterSchedule", "FaultInjector", "draw_cluster_schedule"]


class FaultInjector(Protocol):
    """The faults of an engine and its allocations."""

    harmless: Sequence[str]
    """Faults that must not affect a gang."""
    ends: Mapping[str, tuple[Sequence[str], Sequence[Reason]]]
    """Faults that end an allocation, each with possible statuses of the workflow, and possible reasons of the first cause."""

    def allocations(self) -> list[str]:
        """Return the ids of all allocations that wait or exist."""

    def inject(self, fault: str, allocation: str) -> None:
        """Inject a harmless fault (``allocation`` is then empty), or one that ends this allocation."""

    def repair(self) -> None:
        """Undo all faults that last, and wait until the engine works again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSchedule:
    """The faults and the end of one gang."""

    seed: int
    tasks: int
    faults: tuple[tuple[float, str], ...]
    """Harmless faults, each with the seconds since the submission."""
    end: str
    """How the gang ends: ``complete``, ``exit``, ``rank``, ``cancel``, or a fault of ``FaultInjector.ends``."""
    delay_s: float
    """Seconds from the start of the allocation, or of the tasks, to the end."""
    victim: int
    """The number of the task that ``exit`` or ``rank`` ends."""
    code: int
    """The exit code for ``exit``."""
    is_retried: bool


def draw_cluster_schedule(seed: int, *, harmless: Sequence[str], ends: Sequence[str], most_tasks: int) -> ClusterSchedule:
    """Return the schedule of a seed."""
    dice = random.Random(seed)
    tasks = dice.randint(1, most_tasks)
    end = dice.choice(("complete", "exit", "rank", "cancel", *ends))
    kinds = ("supervisor", "supervisor", *harmless)
    return ClusterSchedule(
        seed=seed, tasks=tasks, end=end, delay_s=dice.choice([0.0, 0.5, 1.0, 3.0]) * dice.random(),
        faults=tuple(sorted((round(dice.uniform(0.0, 6.0), 1), dice.choice(kinds)) for _ in range(dice.randint(0, 3)))),
        victim=dice.randrange(tasks), code=dice.randint(3, 9), is_retried=end in ("exit", "rank") and dice.random() < 0.5,
    )  # fmt: skip


class ClusterGang(ChaosGang):
    """One gang on an engine."""

    end_s = 120.0

    def __init__(self, cli: Cli, injector: FaultInjector, schedule: ClusterSchedule) -> None:
        """Submit nothing yet."""
        super().__init__(cli, schedule.seed, schedule)
        self.injector = injector
        self.schedule = schedule

    @property
    def group(self) -> GroupRecord:
        """The only group of the workflow."""
        return self.record.groups[0]

    def run(self) -> list[str]:
        """Submit the gang, inject all faults, and wait for its end. Return a description of each error."""
        self._submit()
        faults = threading.Thread(target=self._inject_harmless)
        faults.start()
        try:
            self._inject_end()
            faults.join()
            self.injector.repair()
            self._await(self._is_over, "the workflow is over")
        finally:
            (self.folder / "go").touch()
            faults.join()
            self.injector.repair()
        return list(self._errors())

    def _submit(self) -> None:
        schedule = self.schedule
        spec = self.spec(schedule.tasks, is_retried=schedule.is_retried) + "  resources: {default: {cpu: 2}}\n"
        self._name = self.cli.submit(self.cli.spec(spec, f"chaos-{schedule.seed}.yaml"))

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
                self.injector.inject(fault, "")

    def _inject_end(self) -> None:
        schedule, wait = self.schedule, threading.Event().wait
        if schedule.end == "cancel":
            wait(schedule.delay_s)
            self.cli.run("workflow", "cancel", self._name)
        elif schedule.end in ("complete", "exit", "rank"):
            self._await(lambda: self._all_run(0), "all tasks run")
            wait(schedule.delay_s)
            if schedule.end == "complete":
                (self.folder / "go").touch()
            elif schedule.end == "exit":
                self.exit(schedule.victim, schedule.code)
            else:
                _kill(self._rank_pid())
            if schedule.is_retried:
                self._await(lambda: self._all_run(1), "the second attempt runs")
                (self.folder / "go").touch()
        else:
            self._await(lambda: bool(self.injector.allocations()), "there is an allocation")
            wait(schedule.delay_s)
            # If it was refused during the delay, there is no allocation until the next request.
            (allocation,) = wait_until(self.injector.allocations, 60, "there is an allocation")
            self.injector.inject(schedule.end, allocation)
            # An allocation that ended before its tasks were leased is requested again.
            self._await(lambda: self._is_over() or self._has_another(allocation), "the end of the allocation has an effect")
            (self.folder / "go").touch()

    def _rank_pid(self) -> int:
        """The id of the victim's process on this machine. In a container, its file contains another id."""
        name = f"t{self.schedule.victim}"
        pid, lock = (self.folder / f"{name}.pid").read_text().strip(), os.stat(self.folder / f"{name}.lock")
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                match = re.search(r"^NSpid:(.*)", (folder / "status").read_text(), re.MULTILINE)
                if match and match[1].split()[-1] == pid and os.path.samestat(os.stat(folder / "fd/9"), lock):
                    return int(folder.name)
        raise AssertionError(f"{name} has no process {pid}")

    def _has_another(self, allocation: str) -> bool:
        self.injector.repair()
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

    # Checks after the end.

    def _errors(self) -> Iterator[str]:
        schedule, record, group = self.schedule, self.record, self.group
        if (self.folder / "twice").exists():
            yield f"ran twice at once: {(self.folder / 'twice').read_text().split()}"
        statuses, reasons = self._expected()
        # An allocation that ends before its tasks start is requested again.
        if record.status not in statuses and not (record.status == "COMPLETED" and schedule.end in self.injector.ends):
            yield f"is {record.status}, and not {' or '.join(statuses)}: {group.message}"
        if group.cause is not None and group.cause.reason not in reasons:
            yield f"the first cause is {group.cause}, and not one of {[reason.value for reason in reasons]}"
        if group.cause is not None and schedule.end in ("exit", "rank") and group.cause.task != f"t{schedule.victim}":
            yield f"the first cause is {group.cause.task}, and not t{schedule.victim}"
        if group.cause is not None and schedule.end == "exit" and group.cause.exit_code != schedule.code:
            yield f"the exit code is {group.cause.exit_code}, and not {schedule.code}"
        yield from self._lost_output()
        try:
            # After a restart of its API server, Kubernetes may take more than a minute to delete the pods of a deleted owner.
            wait_until(lambda: not self.injector.allocations(), 180)
        except TimeoutError:
            yield f"left the allocations {self.injector.allocations()}"

    def _expected(self) -> tuple[Sequence[str], Sequence[Reason]]:
        schedule = self.schedule
        if schedule.end == "complete" or schedule.is_retried:
            return ("COMPLETED",), ()
        if schedule.end == "cancel":
            return ("FAILED_CANCELED",), (Reason.CANCELED,)
        if schedule.end in ("exit", "rank"):
            return ("FAILED",), (Reason.EXIT_CODE if schedule.end == "exit" else Reason.SIGNAL,)
        return self.injector.ends[schedule.end]

    def _lost_output(self) -> Iterator[str]:
        """Check that each line of a task exists once and in order, up to the last one if the task completed."""
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
