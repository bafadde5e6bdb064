"""Random schedules as values: what is submitted, and what goes wrong when. One seed is one schedule; a failing one shrinks."""

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
"""What may go wrong with simulated nodes, and how often compared to one another."""

HANG_S = 1e9
"""How long a task runs that never ends by itself."""

_ACTIONS = (
    ExitActions(),
    ExitActions(reschedule=((1, 1), (137, 137), (3000, 3006))),
    ExitActions(complete=((2, 2),)),
    ExitActions(fail=((0, 0),)),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """Something that goes wrong, ``after_s`` seconds after what came before it."""

    kind: str
    after_s: float
    which: float
    """Its victim among those that there are then: from 0 to 1, first to last."""
    amount: float = 0.0
    """Of a step of the clock, in seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """Everything that happens in one run."""

    seed: int
    nodes: tuple[int, ...]
    """Their GPUs."""
    offsets_s: tuple[float, ...]
    """How far their clocks are before ours."""
    workflows: tuple[StoredWorkflow, ...]
    faults: tuple[Fault, ...]

    def __str__(self) -> str:
        """Return what a person needs to follow it."""
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
    """Return the seeds to run: those of ``CHAOS_SEEDS`` (``3,17``), else ``CHAOS_RUNS`` many, else the ``usual`` ones."""
    named, runs = os.environ.get("CHAOS_SEEDS"), os.environ.get("CHAOS_RUNS")
    if named:
        return [int(word) for word in named.split(",")]
    return range(int(runs)) if runs else usual


def draw(seed: int) -> Schedule:
    """Return the schedule of a seed."""
    dice = random.Random(seed)
    nodes = tuple(dice.choice([4, 8]) for _ in range(dice.randint(1, 6)))
    stepped = dice.random() < 0.3
    kinds = [kind for kind in FAULTS if stepped or kind != "step"]
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
    """Return how an attempt runs: the same, whatever else is left of its schedule."""
    dice = random.Random(f"{seed}/{name}")
    return Behavior(
        seconds=dice.choice([0.0, 1.0, 30.0, 300.0, HANG_S]),
        exit_code=dice.choice([0, 0, 0, 0, 1, 2]),
        obeys_term=dice.random() < 0.8,
        prepare_error="no space" if dice.random() < 0.03 else "",
    )


def shrink(schedule: Schedule, fails: Callable[[Schedule], bool]) -> Schedule:
    """Return a schedule that still fails, and that passes as soon as one of its faults, workflows or waits is removed."""
    again = True
    while again:
        again = False
        for smaller in _smaller(schedule):
            if fails(smaller):
                schedule, again = smaller, True
                break
    return schedule


def _smaller(schedule: Schedule) -> Iterator[Schedule]:
    """Without half of the faults, a quarter, …, one; then without a workflow; then with less waiting."""
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
