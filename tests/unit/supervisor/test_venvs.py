"""A gang's Python environment is built before the gang leases nodes, and other gangs run meanwhile."""

from __future__ import annotations

from distflow.documents.requirements import Requirements
from distflow.lifecycle.states import Reason, State, WorkflowState
from distflow.plan.model import GroupPlan
from distflow.state.event_details import VenvReady
from distflow.structs import replace
from distflow.testing.backend import Behavior
from unit.supervisor.gangs import Driver, group_plan, node, pool, workflow

VENV = Requirements(file="requirements.txt", lines=("torch==2.4",))


def with_venv(name: str = "train", tasks: int = 2, *, queue_s: float | None = None) -> GroupPlan:
    """A group that needs the environment."""
    return replace(group_plan(name, tasks, queue_s=queue_s), venv=VENV)


def built(driver: Driver) -> list[str]:
    """The nodes of the events about finished builds."""
    return [event.details.node for event in driver.events if isinstance(event.details, VenvReady)]


def test_each_node_builds_once_before_the_gang_leases_nodes() -> None:
    driver = Driver(workflow(with_venv()))
    driver.backend.holds_builds = True
    driver.settle()
    group = driver.group()
    assert (group.state, group.binding) == (State.SCHEDULING, None)
    assert group.message == "building the Python environment of requirements.txt on n1, n2"
    assert (driver.backend.alive, [key.node for key in driver.backend.builds]) == ([], ["n1", "n2"])
    driver.backend.end_build(driver.backend.builds[0])
    driver.settle()
    assert [one.node for one in driver.group().venv_builds] == ["n2"]
    driver.backend.end_build(driver.backend.builds[1])
    driver.run()
    assert driver.record().state is WorkflowState.COMPLETED
    assert built(driver) == ["n1", "n2"]
    driver.add(workflow(with_venv(), uuid="u2"))
    driver.run()
    assert driver.record("u2").state is WorkflowState.COMPLETED
    assert len(driver.backend.builds) == 2


def test_other_gangs_run_during_a_build_and_it_does_not_count_towards_the_queue_timeout() -> None:
    driver = Driver(workflow(with_venv(queue_s=60.0)), workflow(group_plan(), uuid="u2"))
    driver.backend.holds_builds = True
    driver.settle()
    driver.advance(600.0)
    assert driver.record("u2").state is WorkflowState.COMPLETED
    assert driver.group().state is State.SCHEDULING
    for key in driver.backend.builds:
        driver.backend.end_build(key)
    driver.run()
    assert driver.record().state is WorkflowState.COMPLETED


def test_a_failed_build_ends_the_group_and_cancels_the_other_builds() -> None:
    driver = Driver(workflow(with_venv()))
    driver.backend.holds_builds = True
    driver.settle()
    driver.backend.venvs["n1"] = "n1: pip failed with exit code 1:\nno torch"
    first, second = driver.backend.builds
    driver.backend.end_build(first)
    driver.settle()
    group = driver.group()
    assert (group.state, group.reason) == (State.FAILED, Reason.START_ERROR)
    assert group.message == "n1: pip failed with exit code 1:\nno torch"
    assert driver.backend.canceled_builds == [second]
    driver.backend.end_build(second)
    driver.run()
    assert built(driver) == []


def test_a_canceled_workflow_stops_its_builds() -> None:
    driver = Driver(workflow(with_venv()))
    driver.backend.holds_builds = True
    driver.settle()
    driver.cancel()
    driver.run()
    assert driver.record().state is WorkflowState.CANCELED
    assert driver.backend.canceled_builds == driver.backend.builds


def test_a_node_that_becomes_unreachable_during_a_build_is_replaced() -> None:
    driver = Driver(workflow(with_venv(tasks=1)), on=pool(node("n1"), node("n2")))
    driver.backend.holds_builds = True
    driver.settle()
    assert [key.node for key in driver.backend.builds] == ["n1"]
    driver.backend.cut("n1")
    driver.settle()
    assert [key.node for key in driver.backend.builds] == ["n1", "n2"]
    driver.backend.end_build(driver.backend.builds[1])
    driver.run()
    assert driver.record().state is WorkflowState.COMPLETED
    assert driver.group().tasks[0].node == "n2"


def test_the_next_supervisor_requests_the_builds_again() -> None:
    driver = Driver(workflow(with_venv(tasks=1)), behavior=lambda _: Behavior(seconds=1))
    driver.backend.holds_builds = True
    driver.settle()
    driver.restart()
    driver.settle()
    assert [key.node for key in driver.backend.builds] == ["n1", "n1"]
    driver.backend.end_build(driver.backend.builds[1])
    driver.run()
    assert driver.record().state is WorkflowState.COMPLETED
