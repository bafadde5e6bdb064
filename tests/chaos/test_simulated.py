"""Hundreds of random nights, no waiting: each seed is a schedule of faults, and after each what distflow promises holds.

``CHAOS_RUNS=5000`` runs more of them, ``CHAOS_SEEDS=17,23`` these. One that fails says its seed and what is left of it.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from chaos.nights import leaks, lies, play
from chaos.schedules import behaviour, draw, seeds, shrink
from distflow.supervisor.world import Workflow
from unit.supervisor.gangs import Driver, group_plan, node, pool, workflow


@pytest.mark.parametrize("seed", seeds(range(200)))
def test_every_workflow_ends_and_nothing_leaks_hangs_or_lies(seed: int) -> None:
    schedule = draw(seed)
    if not play(schedule):
        return
    least = shrink(schedule, lambda smaller: bool(play(smaller)))
    pytest.fail("\n".join([str(least), "is wrong:", *play(least)]))


def test_a_schedule_shrinks_to_what_makes_it_fail() -> None:
    schedule = draw(3)

    def is_cut_and_killed(smaller: object) -> bool:
        return {"cut", "kill"} <= {fault.kind for fault in getattr(smaller, "faults")}  # noqa: B009

    assert is_cut_and_killed(schedule)
    least = shrink(schedule, is_cut_and_killed)
    assert sorted(fault.kind for fault in least.faults) == ["cut", "kill"]
    assert (len(least.workflows), [fault.after_s for fault in least.faults]) == (1, [0.0, 0.0])
    assert str(least).startswith("seed 3: ")


def test_a_thousand_nodes_lose_a_rack_and_a_supervisor() -> None:
    """Gangs come for as long as others go, so that some hundreds run at any time; nothing grows with those that have ended."""
    dice = random.Random(1)
    nodes = [node(f"n{number}") for number in range(1000)]
    rack = [one.name for one in nodes[:100]]
    driver = Driver(on=pool(*nodes), behaviour=lambda key: replace(behaviour(0, key.name), seconds=dice.choice([100.0, 500.0])))
    ended: dict[str, Workflow] = {}
    waves = [[workflow(group_plan("g", dice.randint(1, 8)), uuid=f"u{wave}-{i}") for i in range(40)] for wave in range(6)]
    for number in range(200):
        for one in waves[number] if number < len(waves) else ():
            driver.add(one)
        for name in rack if number == 4 else ():
            driver.backend.cut(name)
        for name in rack if number == 12 else ():
            driver.backend.heal(name)
        if number == 6:
            driver.restart()
        for key in driver.backend.running[:5] if number % 3 == 0 else ():
            driver.backend.kill(key.name)
        driver.clock.advance(20.0)
        driver.backend.tick()
        driver.settle(rounds=1000)
        over = [uuid for uuid, one in driver.workflows.items() if one.record.state.is_final and not _has_stray(one)]
        ended |= {uuid: driver.workflows.pop(uuid) for uuid in over}
        if number >= len(waves) and not driver.workflows:
            break
    assert not driver.workflows
    driver.workflows = ended
    assert len(ended) == 240
    assert [*leaks(driver), *lies(driver)] == []


def _has_stray(one: Workflow) -> bool:
    return any(task.stray is not None for group in one.record.groups for task in group.attempts)
