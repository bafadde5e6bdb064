"""Random nights: seeds, faults and thousands of decisions, no waiting. What distflow promises holds after each of them."""

from __future__ import annotations

import random

import pytest

from distflow.backends.base import AttemptKey
from distflow.lifecycle.exits import ExitActions
from distflow.lifecycle.states import Reason, State, is_legal
from distflow.spec.model import Retry
from distflow.state.record import CancelRequest
from distflow.testing.backend import Behaviour
from unit.supervisor.gangs import Driver, group_plan, node, pool, workflow


@pytest.mark.parametrize("seed", range(100))
def test_every_workflow_ends_and_nothing_is_left(seed: int) -> None:
    dice = random.Random(seed)
    actions = [ExitActions(), ExitActions(reschedule=((1, 3006),)), ExitActions(complete=((2, 2),))]
    nodes = [node(f"n{i}", gpus=dice.choice([4, 8])) for i in range(dice.randint(1, 5))]
    behaviours: dict[str, Behaviour] = {}

    def behave(key: AttemptKey) -> Behaviour:
        return behaviours.setdefault(
            key.name,
            Behaviour(
                seconds=dice.choice([0.0, 1.0, 30.0, 300.0]),
                exit_code=dice.choice([0, 0, 0, 0, 1, 2]),
                obeys_term=dice.random() < 0.8,
                refuses="no space" if dice.random() < 0.03 else "",
            ),
        )

    driver = Driver(on=pool(*nodes), behaviour=behave)
    for number in range(dice.randint(1, 8)):
        plans = [
            group_plan(
                f"g{i}", dice.randint(1, len(nodes)), world=dice.random() < 0.7, gpus=dice.choice([0, 1, 4]),
                exec_s=dice.choice([None, 60.0]), queue_s=dice.choice([None, 5000.0]), barrier=dice.random() < 0.8,
                exit_actions=dice.choice(actions),
                retry=Retry(limit=dice.choice([0, 1, 3]), backoff_s=dice.choice([0.0, 20.0])),
            )
            for i in range(dice.randint(1, 3))
        ]  # fmt: skip
        driver.add(workflow(*plans, uuid=f"u{number}", at=float(number)))
    states: dict[tuple[str, str, str], State] = {}
    for _ in range(120):
        driver.settle()
        _only_legal_moves(driver, states)
        _fault(dice, driver)
        driver.advance(dice.choice([0.0, 0.5, 5.0, 40.0]))
    for one in nodes:
        driver.backend.heal(one.name)
    driver.settle()
    driver.run(limit=50_000)
    # A node that was lost for good may still hold what ran there; every other attempt is gone.
    lost = {
        f"{uuid}/{group.name}/{task.name}/{task.attempt}"
        for uuid, each in driver.workflows.items()
        for group in each.record.groups
        for task in group.attempts
        if task.reason is Reason.NODE_LOST
    }
    assert set(driver.backend.alive) <= lost, f"seed {seed}"
    assert len(driver.backend.starts) == len(set(driver.backend.starts)), f"seed {seed}: something ran twice"
    for ended in driver.workflows.values():
        for group in ended.record.groups:
            assert group.state.is_final
            for task in group.attempts:
                assert task.state.is_final, f"seed {seed}: {task}"
            assert group.attempt <= ended.plan.group(group.name).retry.limit
            assert len(group.attempts) == len(group.tasks) * (group.attempt + 1)
            if group.state is State.FAILED and group.reason in (Reason.EXIT_CODE, Reason.SIGNAL):
                assert group.cause is not None
                culprit = group.task(group.cause.task)
                assert culprit.reason is not Reason.PEER_FAILED


def _fault(dice: random.Random, driver: Driver) -> None:
    names = [one.name for one in driver.pool.nodes]
    kind = dice.random()
    if kind < 0.08:
        driver.backend.cut(dice.choice(names))
    elif kind < 0.2:
        driver.backend.heal(dice.choice(names))
    elif kind < 0.25 and driver.backend.alive:
        driver.backend.kill(dice.choice(driver.backend.alive))
    elif kind < 0.3:
        driver.restart()
    elif kind < 0.32:
        uuid = dice.choice(list(driver.workflows))
        if driver.record(uuid).cancel is None:
            driver.change(uuid, cancel=CancelRequest(at=driver.clock.now(), by="me"))


def _only_legal_moves(driver: Driver, states: dict[tuple[str, str, str], State]) -> None:
    for uuid, one in driver.workflows.items():
        for group in one.record.groups:
            before = states.setdefault((uuid, group.name, ""), group.state)
            # Several moves may lie between two looks, but an end is never left.
            assert not (before.is_final and not is_legal(before, group.state))
            states[uuid, group.name, ""] = group.state
