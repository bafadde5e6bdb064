"""Random schedules of workflows and faults for simulated nodes. A failing schedule can be shrunk."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from distflow.lifecycle.exits import ExitActions
from distflow.plan.model import GroupPlan
from distflow.spec.model import Retry
from distflow.structs import replace
from distflow.supervisor.snapshot import StoredWorkflow
from distflow.testing.attempts import Behavior
from unit.supervisor.gangs import group_plan, workflow

__all__ = ["FAULTS", "HANG_S", "Fault", "Schedule", "behavior", "draw", "seeds", "shrink"]

FAULTS = {
    "cut": 6,
    "heal": 9,
    "silence": 4,
    "kill": 6,
    "restart": 6,
    "die": 6,
    "reboot": 2,
    "forget": 1,
    "cancel": 2,
    "force": 1,
    "expire": 2,
    "step": 1,
    "nothing": 8,
}
"""The kinds of faults of simulated nodes, with their relative frequencies."""

HANG_S = 1e9
"""The duration of a task that never ends by itself."""

_ACTIONS = (
    ExitActions(),
    ExitActions(reschedule=((1, 1), (137, 137), (3000, 3006))),
    ExitActions(complete=((2, 2),)),
    ExitActions(fail=((0, 0),)),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A fault, ``after_s`` seconds after the previous one."""

    kind: str
    after_s: float
    which: float
    """The affected node, task or workflow among those that exist at this moment: from 0 to 1, first to last."""
    amount: float = 0.0
    """The step of the clock in seconds, for the kind ``step``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """Everything that happens in one run."""

    seed: int
    nodes: tuple[int, ...]
    """The number of GPUs of each node."""
    offsets_s: tuple[float, ...]
    """By how much each node's clock is ahead of this machine's clock."""
    workflows: tuple[StoredWorkflow, ...]
    faults: tuple[Fault, ...]

    def __str__(self) -> str:
        """Return a description for people."""
        lines = [f"seed {self.seed}: nodes with {self.nodes} GPUs"]
        for one in self.workflows:
            for group in one.plan.groups:
                what = f"{len(group.launches)} tasks of {group.launches[0].resource.gpu} GPUs, retry {group.retry.limit}"
                lines.append(
                    f"  {one.record.uuid}/{group.name}: {what}, after {group.upstream}, {group.launches[0].exit_actions}"
                )
        lines += [f"  +{fault.after_s:g} s: {fault.kind} {fault.which:.3f} {fault.amount:g}" for fault in self.faults]
        return "\n".join(lines)


def seeds(usual: Sequence[int]) -> Sequence[int]:
    """Return the seeds of ``CHAOS_SEEDS`` (``3,17``), else the first ``CHAOS_RUNS`` seeds, else the ``usual`` ones."""
    named, runs = os.environ.get("CHAOS_SEEDS"), os.environ.get("CHAOS_RUNS")
    if named:
        return [int(word) for word in named.split(",")]
    return range(int(runs)) if runs else usual


def draw(seed: int) -> Schedule:
    """Return the schedule of a seed."""
    dice = random.Random(seed)
    nodes = tuple(dice.choice([4, 8]) for _ in range(dice.randint(1, 6)))
    has_steps = dice.random() < 0.3
    kinds = [kind for kind in FAULTS if has_steps or kind != "step"]
    weights = [FAULTS[kind] for kind in kinds]
    return Schedule(
        seed=seed,
        nodes=nodes,
        offsets_s=tuple(dice.choice([0.0, 0.0, -300.0, 3600.0]) for _ in nodes),
        workflows=tuple(_workflow(dice, f"u{number}", len(nodes)) for number in range(dice.randint(1, 8))),
        faults=tuple(
            Fault(
                kind=dice.choices(kinds, weights)[0], after_s=dice.choice([0.0, 0.5, 5.0, 40.0, 130.0]), which=dice.random(),
                amount=dice.choice([-3600.0, -30.0, 30.0, 3600.0]),
            )
            for _ in range(dice.randint(10, 80))
        ),
    )  # fmt: skip


def behavior(seed: int, name: str) -> Behavior:
    """Return the behavior of an attempt. It does not depend on the rest of the schedule, which may shrink."""
    dice = random.Random(f"{seed}/{name}")
    return Behavior(
        seconds=dice.choice([0.0, 1.0, 30.0, 300.0, HANG_S]),
        exit_code=dice.choice([0, 0, 0, 0, 1, 2]),
        obeys_term=dice.random() < 0.8,
        prepare_error="no space" if dice.random() < 0.03 else "",
    )


def shrink(schedule: Schedule, fails: Callable[[Schedule], bool]) -> Schedule:
    """Remove faults, workflows and waits until the schedule no longer fails without one of the remaining ones."""
    has_shrunk = True
    while has_shrunk:
        has_shrunk = False
        for smaller in _smaller(schedule):
            if fails(smaller):
                schedule, has_shrunk = smaller, True
                break
    return schedule


def _smaller(schedule: Schedule) -> Iterator[Schedule]:
    """Yield schedules without half of the faults, a quarter, …, one; then without a workflow; then without a wait."""
    faults, workflows = schedule.faults, schedule.workflows
    size = len(faults)
    while size:
        for at in range(0, len(faults), size):
            yield replace(schedule, faults=faults[:at] + faults[at + size :])
        size //= 2
    for at in range(len(workflows) if len(workflows) > 1 else 0):
        yield replace(schedule, workflows=workflows[:at] + workflows[at + 1 :])
    for at, fault in enumerate(faults):
        if fault.after_s:
            yield replace(schedule, faults=(*faults[:at], replace(fault, after_s=0.0), *faults[at + 1 :]))


def _workflow(dice: random.Random, uuid: str, nodes: int) -> StoredWorkflow:
    groups: list[GroupPlan] = []
    for number in range(dice.randint(1, 3)):
        upstream = tuple(one.name for one in groups if dice.random() < 0.3)
        groups.append(
            group_plan(
                f"g{number}", dice.randint(1, min(4, nodes)), world=dice.random() < 0.7, gpus=dice.choice([0, 1, 4]),
                exec_s=dice.choice([None, 60.0]), queue_s=dice.choice([None, None, 5000.0]), barrier=dice.random() < 0.8,
                exit_actions=dice.choice(_ACTIONS), after=upstream,
                retry=Retry(limit=dice.choice([0, 1, 3]), backoff_s=dice.choice([0.0, 20.0])),
            )
        )  # fmt: skip
    return workflow(*groups, uuid=uuid)
