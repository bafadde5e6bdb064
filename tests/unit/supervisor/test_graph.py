"""Groups that wait for others: the order, what a failure does to what waits, cancels, and supervisors that were killed."""

from __future__ import annotations

import pytest

from distflow.backends.base import AttemptKey
from distflow.lifecycle.states import Reason, State, WorkflowState
from distflow.plan.model import GroupPlan
from distflow.state.record import CancelRequest, GroupRecord
from distflow.supervisor.world import Workflow
from distflow.testing.backend import Behaviour
from unit.supervisor.gangs import Driver, group_plan, node, pool, workflow

HANG = Behaviour(seconds=float("inf"))
WAITING, COMPLETED, FAILED = State.WAITING, State.COMPLETED, State.FAILED


def small(name: str, *after: str, **settings: float) -> GroupPlan:
    """A group of one task that needs nothing."""
    return group_plan(name, 1, world=False, gpus=0, after=after, **settings)  # type: ignore[arg-type]


def diamond() -> Workflow:
    """``left`` and ``right`` wait for ``top``, ``bottom`` for both."""
    return workflow(small("top"), small("left", "top"), small("right", "top"), small("bottom", "left", "right"))


def group(driver: Driver, name: str) -> GroupRecord:
    return driver.record().group(name)


def states(driver: Driver) -> dict[str, State]:
    return {one.name: one.state for one in driver.record().groups}


def failing(name: str) -> object:
    def behave(key: AttemptKey) -> Behaviour:
        return Behaviour(seconds=2, exit_code=3) if key.group == name else Behaviour(seconds=5)

    return behave


def test_a_group_starts_when_all_that_it_waits_for_have_completed() -> None:
    def behave(key: AttemptKey) -> Behaviour:
        return Behaviour(seconds=9 if key.group == "right" else 1)

    driver = Driver(diamond(), behaviour=behave)
    driver.settle()
    assert states(driver) == {"top": State.RUNNING, "left": WAITING, "right": WAITING, "bottom": WAITING}
    assert group(driver, "left").tasks[0].state is WAITING
    driver.advance(1.0)
    assert states(driver) == {"top": COMPLETED, "left": State.RUNNING, "right": State.RUNNING, "bottom": WAITING}
    driver.advance(1.0)
    assert states(driver)["left"] is COMPLETED
    assert states(driver)["bottom"] is WAITING
    driver.run()
    assert driver.record().state is WorkflowState.COMPLETED
    assert driver.backend.starts[-1] == "u1/bottom/t0/0"


def test_what_a_group_waits_for_is_said_once_and_as_it_changes() -> None:
    driver = Driver(diamond(), behaviour=lambda key: Behaviour(seconds=9 if key.group == "right" else 1))
    driver.settle()
    assert group(driver, "bottom").message == "waits for left and right"
    driver.advance(1.0)
    driver.advance(1.0)
    assert group(driver, "bottom").message == "waits for right"
    driver.run()
    assert group(driver, "bottom").message == ""
    told = [event.text for event in driver.events if event.group == "bottom"]
    assert told[:3] == ["bottom: waits for left and right", "bottom: waits for right", "bottom: SCHEDULING"]


def test_a_failure_ends_what_waits_for_it_through_the_graph_while_siblings_go_on() -> None:
    graph = workflow(small("top"), small("middle", "top"), small("bottom", "middle"), small("aside"))
    driver = Driver(graph, behaviour=failing("top"))  # type: ignore[arg-type]
    driver.settle()
    driver.advance(2.0)
    assert states(driver) == {"top": FAILED, "middle": FAILED, "bottom": FAILED, "aside": State.RUNNING}
    assert driver.record().state is WorkflowState.RUNNING
    for name, blamed in (("middle", "top"), ("bottom", "middle")):
        one = group(driver, name)
        assert (one.reason, one.status) == (Reason.UPSTREAM, "FAILED_UPSTREAM")
        assert one.tasks[0].status == "FAILED_UPSTREAM"
        assert one.message.startswith(f"{blamed}, which it depends on, did not complete: FAILED")
    driver.run()
    assert states(driver)["aside"] is COMPLETED
    assert (driver.record().state, driver.record().reason) == (WorkflowState.FAILED, Reason.EXIT_CODE)
    assert driver.backend.starts == ["u1/top/t0/0", "u1/aside/t0/0"]


def test_a_timeout_of_the_first_shows_as_the_workflows_reason() -> None:
    driver = Driver(workflow(small("top", exec_s=3.0), small("bottom", "top")), behaviour=lambda _: HANG)
    driver.run()
    assert group(driver, "bottom").reason is Reason.UPSTREAM
    assert driver.record().reason is Reason.EXEC_TIMEOUT


@pytest.mark.parametrize("at", [0.0, 1.0])
def test_a_cancel_ends_groups_that_run_and_groups_that_wait(at: float) -> None:
    driver = Driver(diamond(), behaviour=lambda key: Behaviour(seconds=1) if key.group == "top" else HANG)
    driver.settle()
    driver.advance(at)
    driver.change("u1", cancel=CancelRequest(at=at, by="ada", message="wrong data"))
    driver.run()
    assert driver.record().state is WorkflowState.CANCELED
    bottom = group(driver, "bottom")
    assert (bottom.state, bottom.reason, bottom.message) == (State.CANCELED, Reason.CANCELED, "canceled by ada: wrong data")
    assert {one for name, one in states(driver).items() if name != "top"} == {State.CANCELED}
    assert driver.backend.alive == []


def test_the_queue_timeout_of_a_group_begins_when_it_no_longer_waits() -> None:
    driver = Driver(workflow(small("top"), small("bottom", "top", queue_s=5.0)), behaviour=lambda _: Behaviour(seconds=60))
    begun = driver.clock.now()
    driver.run()
    assert driver.record().state is WorkflowState.COMPLETED
    assert group(driver, "bottom").scheduling_at == pytest.approx(begun + 60.0, abs=0.1)


def test_a_group_that_no_longer_waits_does_not_lose_its_place_to_later_workflows() -> None:
    one_node = pool(node("n1"))
    first = workflow(group_plan("top", 1), group_plan("bottom", 1, after=("top",)))
    driver = Driver(first, workflow(group_plan("other", 1), uuid="u2", at=1.0), on=one_node)
    driver.run()
    assert driver.backend.starts == ["u1/top/t0/0", "u1/bottom/t0/0", "u2/other/t0/0"]


@pytest.mark.parametrize("after_s", [0.0, 1.0, 2.0, 3.0])
def test_a_killed_supervisor_takes_the_graph_up_where_it_was(after_s: float) -> None:
    driver = Driver(diamond())
    driver.settle()
    driver.clock.advance(after_s)
    driver.backend.tick()
    driver.restart()
    driver.run()
    assert driver.record().state is WorkflowState.COMPLETED
    assert sorted(driver.backend.starts) == sorted(f"u1/{name}/t0/0" for name in ("top", "left", "right", "bottom"))
