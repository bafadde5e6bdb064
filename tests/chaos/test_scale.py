"""Thousands of simulated nodes on one clock: gangs come for as long as others go, while racks, processes and supervisors fail.

``CHAOS_EVENTS=1000000`` goes on for that many things seen.
"""

from __future__ import annotations

import os
import random
from dataclasses import replace

import pytest

from chaos.nights import doubles, leaks, lies, unfinished
from chaos.schedules import behaviour
from distflow.supervisor.world import Workflow
from unit.supervisor.gangs import Driver, group_plan, node, pool, workflow

NODES, RACK = 3000, 40
MOST_TASKS = 16
AHEAD = 60
"""Gangs that have not started at any time."""
EVENTS = int(os.environ.get("CHAOS_EVENTS", "30000"))

pytestmark = pytest.mark.timeout(max(180, EVENTS // 500))


def test_three_thousand_nodes_lose_racks_processes_and_supervisors() -> None:
    dice = random.Random(1)
    nodes = [node(f"n{number}") for number in range(NODES)]
    driver = Driver(on=pool(*nodes), behaviour=lambda key: replace(behaviour(0, key.name), seconds=dice.uniform(500.0, 1500.0)))
    submitted = ended = 0
    cut: list[str] = []
    wrong: list[str] = []
    while driver.count < EVENTS or driver.workflows:
        is_open = driver.count < EVENTS
        ahead = sum(one.record.started_at is None for one in driver.workflows.values())
        for _ in range(AHEAD - ahead if is_open else 0):
            submitted += 1
            driver.add(workflow(group_plan("g", dice.randint(1, MOST_TASKS)), uuid=f"u{submitted}"))
        fault = dice.random()
        if fault < 0.1 or not is_open:
            for name in cut:
                driver.backend.heal(name)
            first = dice.randrange(0, NODES, RACK)
            cut = [one.name for one in nodes[first : first + RACK]] if is_open else []
            for name in cut:
                driver.backend.cut(name)
        elif fault < 0.3:
            for key in dice.sample(driver.backend.running, k=min(5, len(driver.backend.running))):
                driver.backend.kill(key.name)
        elif fault < 0.32:
            driver.restart()
        driver.clock.advance(dice.uniform(1.0, 40.0))
        driver.backend.tick()
        driver.settle(rounds=1000)
        wrong += doubles(driver)
        over = {uuid: one for uuid, one in driver.workflows.items() if _is_over(one)}
        for uuid in over:
            del driver.workflows[uuid]
        ended += len(over)
        wrong += [*unfinished(over), *lies(over, driver.backend.ends)]
        driver.backend.clean(over)
        driver.events.clear()
        driver.launches.clear()
    assert [*wrong, *leaks(driver)] == []
    assert ended == submitted
    print(f"{ended} gangs on {NODES} nodes, {driver.count} things seen")


def _is_over(one: Workflow) -> bool:
    tasks = [task for group in one.record.groups for task in group.attempts]
    return one.record.state.is_final and all(task.log_complete and task.stray is None for task in tasks)
