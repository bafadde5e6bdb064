"""Thousands of simulated nodes on one clock: new gangs replace ended ones, while racks, processes and supervisors fail.

``CHAOS_EVENTS=1000000`` sets the number of observations.
"""

from __future__ import annotations

import os
import random

import pytest

from chaos.nights import concurrent_attempts, record_errors, unfinished
from chaos.schedules import behavior
from distflow.plan.model import Plan
from distflow.structs import replace
from distflow.supervisor.snapshot import StoredWorkflow
from unit.supervisor.gangs import Driver, group_plan, node, pool, workflow

NODES, RACK = 3000, 40
MOST_TASKS = 16
QUEUED = 60
"""The number of submitted gangs that have not started."""
EVENTS = int(os.environ.get("CHAOS_EVENTS", "10000"))

pytestmark = pytest.mark.timeout(max(600, EVENTS // 100))


def test_three_thousand_nodes_lose_racks_processes_and_supervisors() -> None:
    dice = random.Random(1)
    nodes = [node(f"n{number}") for number in range(NODES)]
    driver = Driver(on=pool(*nodes), behavior=lambda key: replace(behavior(0, key.name), seconds=dice.uniform(500.0, 1500.0)))
    submitted = ended = 0
    unfinished_plans: dict[str, Plan] = {}
    cut: list[str] = []
    errors: list[str] = []
    while driver.observation_count < EVENTS or unfinished_plans:
        is_submitting = driver.observation_count < EVENTS
        started = {one.record.uuid for one in driver.supervisor.snapshot().workflows if one.record.started_at is not None}
        queued = len(unfinished_plans.keys() - started)
        for _ in range(QUEUED - queued if is_submitting else 0):
            submitted += 1
            one = workflow(group_plan("g", dice.randint(1, MOST_TASKS)), uuid=f"u{submitted}")
            driver.add(one)
            unfinished_plans[one.record.uuid] = one.plan
        fault = dice.random()
        if fault < 0.1 or not is_submitting:
            for name in cut:
                driver.backend.heal(name)
            first = dice.randrange(0, NODES, RACK)
            cut = [one.name for one in nodes[first : first + RACK]] if is_submitting else []
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
        errors += concurrent_attempts(driver)
        ended_uuids = unfinished_plans.keys() - driver.reader.uuids(are_unfinished=True)
        ended_workflows = {
            uuid: StoredWorkflow(record=driver.reader.find(uuid), plan=unfinished_plans.pop(uuid))
            for uuid in sorted(ended_uuids)
        }
        ended += len(ended_workflows)
        errors += [*unfinished(ended_workflows), *record_errors(ended_workflows, driver.backend.ends)]
        driver.backend.clean(ended_workflows)
        driver.backend.launches.clear()
    assert [*errors, *(f"{name} is left on its node" for name in driver.backend.alive), *driver.supervisor.in_flight] == []
    assert ended == submitted
    print(f"{ended} gangs on {NODES} nodes, {driver.observation_count} observations")
