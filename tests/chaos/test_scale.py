"""Thousands of simulated nodes on one clock: gangs come for as long as others go, while racks, processes and supervisors fail.

``CHAOS_EVENTS=1000000`` continues for that many observations.
"""

from __future__ import annotations

import os
import random

import pytest

from chaos.nights import doubles, lies, unfinished
from chaos.schedules import behavior
from distflow.plan.model import Plan
from distflow.structs import replace
from distflow.supervisor.snapshot import StoredWorkflow
from unit.supervisor.gangs import Driver, group_plan, node, pool, workflow

NODES, RACK = 3000, 40
MOST_TASKS = 16
AHEAD = 60
"""Gangs that have not started at any time."""
EVENTS = int(os.environ.get("CHAOS_EVENTS", "10000"))

pytestmark = pytest.mark.timeout(max(600, EVENTS // 100))


def test_three_thousand_nodes_lose_racks_processes_and_supervisors() -> None:
    dice = random.Random(1)
    nodes = [node(f"n{number}") for number in range(NODES)]
    driver = Driver(on=pool(*nodes), behavior=lambda key: replace(behavior(0, key.name), seconds=dice.uniform(500.0, 1500.0)))
    submitted = ended = 0
    open_ones: dict[str, Plan] = {}
    cut: list[str] = []
    wrong: list[str] = []
    while driver.count < EVENTS or open_ones:
        is_open = driver.count < EVENTS
        started = {one.record.uuid for one in driver.supervisor.snapshot().workflows if one.record.started_at is not None}
        ahead = len(open_ones.keys() - started)
        for _ in range(AHEAD - ahead if is_open else 0):
            submitted += 1
            one = workflow(group_plan("g", dice.randint(1, MOST_TASKS)), uuid=f"u{submitted}")
            driver.add(one)
            open_ones[one.record.uuid] = one.plan
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
        ended_uuids = open_ones.keys() - driver.reader.uuids(are_unfinished=True)
        over = {uuid: StoredWorkflow(record=driver.reader.find(uuid), plan=open_ones.pop(uuid)) for uuid in sorted(ended_uuids)}
        ended += len(over)
        wrong += [*unfinished(over), *lies(over, driver.backend.ends)]
        driver.backend.clean(over)
        driver.backend.launches.clear()
    assert [*wrong, *(f"{name} is left on its node" for name in driver.backend.alive), *driver.supervisor.in_flight] == []
    assert ended == submitted
    print(f"{ended} gangs on {NODES} nodes, {driver.count} things seen")
