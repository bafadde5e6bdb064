"""Gangs that may run with fewer of their tasks."""

from __future__ import annotations

from distflow.backends.base import AttemptKey
from distflow.lifecycle.exits import ExitActions
from distflow.lifecycle.states import State
from distflow.plan.model import GroupPlan
from distflow.spec.model import Retry
from distflow.structs import replace
from distflow.supervisor.snapshot import StoredWorkflow
from distflow.testing.backend import Behavior
from unit.supervisor.gangs import Driver, group_plan, node, pool, workflow

HANG = Behavior(seconds=float("inf"))
ON_LOST_NODE = ExitActions(reschedule=((3001, 3001),))


def _plan(tasks: int, **settings: object) -> GroupPlan:
    return group_plan(tasks=tasks, exit_actions=ON_LOST_NODE, retry=Retry(limit=5, backoff_s=0.0), **settings)  # type: ignore[arg-type]


def _elastic(most: int, least: int, wait_s: float = 60.0) -> StoredWorkflow:
    smaller = tuple(_plan(size) for size in range(most - 1, least - 1, -1))
    return workflow(replace(_plan(most), smaller=smaller, smaller_after_s=wait_s))


ALL_TASKS = ("t0", "t1", "t2")


def test_gang_starts_at_once_at_full_size_if_there_is_room() -> None:
    driver = Driver(_elastic(3, 1), on=pool(*(node(f"n{i}") for i in range(3))), behavior=lambda _: HANG)
    driver.settle()
    assert tuple(task.name for task in driver.group().tasks) == ALL_TASKS
    assert (driver.group().state, driver.group().left_out) == (State.RUNNING, ())


def test_gang_waits_and_then_runs_at_the_size_that_fits() -> None:
    driver = Driver(_elastic(4, 1), on=pool(node("n0"), node("n1"), node("n2")), behavior=lambda _: HANG)
    began = driver.clock.now()
    assert driver.settle() == began + 60.0
    assert driver.group().state is State.SCHEDULING
    driver.advance(59.0)
    assert driver.group().state is State.SCHEDULING
    driver.advance(1.0)
    assert driver.group().state is State.RUNNING
    assert [task.node for task in driver.group().tasks] == ["n0", "n1", "n2"]
    assert driver.group().left_out == ("t3",)
    assert any(event.text.endswith("; runs without t3") for event in driver.events)
    assert driver.backend.starts == ["u1/train/t0/0", "u1/train/t1/0", "u1/train/t2/0"]


def test_pool_with_fewer_nodes_than_the_minimum_size_can_never_run_it() -> None:
    driver = Driver(_elastic(4, 3), on=pool(node("n0"), node("n1")), behavior=lambda _: HANG)
    driver.settle()
    assert driver.group().state is State.FAILED
    assert "no room for t2" in driver.group().message


def test_attempt_after_a_lost_node_is_smaller_and_the_one_after_it_has_full_size() -> None:
    nodes = pool(*(node(f"n{i}") for i in range(3)), node_lost_after_s=30.0)
    driver = Driver(_elastic(3, 2, wait_s=10.0), on=nodes, behavior=lambda _: HANG)
    driver.settle()
    driver.backend.cut("n2")
    driver.advance(31.0)
    driver.advance(1.0)
    group = driver.group()
    assert (group.attempt, group.state, tuple(task.name for task in group.tasks)) == (1, State.SCHEDULING, ALL_TASKS)
    driver.advance(10.0)
    group = driver.group()
    assert (group.state, group.left_out, [task.node for task in group.tasks]) == (State.RUNNING, ("t2",), ["n0", "n1"])
    # A running gang does not grow. The next attempt is as large as the room allows.
    driver.backend.heal("n2")
    driver.settle()
    assert driver.group().left_out == ("t2",)
    driver.backend.cut("n1")
    driver.advance(31.0)
    driver.backend.heal("n1")
    driver.advance(1.0)
    assert (driver.group().attempt, driver.group().state, driver.group().left_out) == (2, State.RUNNING, ())
    assert [(task.name, task.attempt) for task in driver.group().attempts] == [
        ("t0", 2), ("t0", 1), ("t0", 0), ("t1", 2), ("t1", 1), ("t1", 0), ("t2", 2), ("t2", 0),
    ]  # fmt: skip


def test_lease_that_is_lost_before_the_start_is_requested_again_at_full_size() -> None:
    cuts = ["n1"]

    def cut_once(key: AttemptKey) -> Behavior:
        if key.node in cuts:
            cuts.remove(key.node)
            driver.backend.cut(key.node)
        return HANG

    driver = Driver(_elastic(3, 1, wait_s=0.0), on=pool(node("n0"), node("n1")), behavior=cut_once)
    driver.settle()
    assert (driver.group().state, driver.group().left_out) == (State.INITIALIZING, ("t2",))
    driver.backend.expire("u1/train/t1/0")
    driver.backend.heal("n1")
    driver.settle()
    group = driver.group()
    assert (group.state, group.left_out, tuple(task.name for task in group.tasks)) == (State.SCHEDULING, (), ALL_TASKS)
    driver.advance(2.0)
    assert (driver.group().state, driver.group().left_out) == (State.RUNNING, ("t2",))


def test_nodes_with_too_many_failures_are_avoided_even_if_the_gang_becomes_smaller() -> None:
    one = _elastic(2, 1, wait_s=5.0)
    on_refusal = ExitActions(reschedule=((3003, 3003),))
    plan = one.plan.groups[0].with_launches(lambda launch: replace(launch, exit_actions=on_refusal))
    plan = replace(plan, retry=replace(plan.retry, avoid_after=1))
    driver = Driver(
        replace(one, plan=replace(one.plan, groups=(plan,))), on=pool(node("n0"), node("n1")),
        behavior=lambda key: Behavior(prepare_error="no space") if key.node == "n1" else HANG,
    )  # fmt: skip
    driver.settle()
    driver.advance(1.0)
    assert driver.group().attempt == 1
    driver.advance(5.0)
    assert (driver.group().state, driver.group().left_out) == (State.RUNNING, ("t1",))
    assert [task.node for task in driver.group().tasks] == ["n0"]
