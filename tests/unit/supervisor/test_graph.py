"""Groups that wait for others: their order, failures of upstream groups, cancellations, killed supervisors, and outputs."""

from __future__ import annotations

import pytest

from distflow.backends.base import AttemptKey, Collected, CollectFailed, Collecting, CollectUnanswered
from distflow.lifecycle.states import Reason, State, WorkflowState
from distflow.plan.model import GroupPlan
from distflow.spec.model import InputSpec
from distflow.state.record import GroupRecord
from distflow.structs import replace
from distflow.supervisor.commands import CollectOutput, CommandId
from distflow.supervisor.snapshot import StoredWorkflow
from distflow.supervisor.transfers import archives
from distflow.testing.backend import Behavior
from unit.supervisor.gangs import Driver, group_plan, node, pool, workflow

HANG = Behavior(seconds=float("inf"))
WAITING, COMPLETED, FAILED = State.WAITING, State.COMPLETED, State.FAILED


def small(name: str, *after: str, **settings: float) -> GroupPlan:
    """A group of one task that needs no GPU."""
    return group_plan(name, 1, world=False, gpus=0, after=after, **settings)  # type: ignore[arg-type]


def diamond() -> StoredWorkflow:
    """``left`` and ``right`` wait for ``top``, ``bottom`` for both."""
    return workflow(small("top"), small("left", "top"), small("right", "top"), small("bottom", "left", "right"))


def group(driver: Driver, name: str) -> GroupRecord:
    return driver.record().group(name)


def states(driver: Driver) -> dict[str, State]:
    return {one.name: one.state for one in driver.record().groups}


def failing(name: str) -> object:
    def behave(key: AttemptKey) -> Behavior:
        return Behavior(seconds=2, exit_code=3) if key.group == name else Behavior(seconds=5)

    return behave


def test_group_starts_when_all_upstream_groups_have_completed() -> None:
    def behave(key: AttemptKey) -> Behavior:
        return Behavior(seconds=9 if key.group == "right" else 1)

    driver = Driver(diamond(), behavior=behave)
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


def test_awaited_groups_are_reported_once_per_change() -> None:
    driver = Driver(diamond(), behavior=lambda key: Behavior(seconds=9 if key.group == "right" else 1))
    driver.settle()
    assert group(driver, "bottom").message == "waits for left and right"
    driver.advance(1.0)
    driver.advance(1.0)
    assert group(driver, "bottom").message == "waits for right"
    driver.run()
    assert group(driver, "bottom").message == ""
    messages = [event.text for event in driver.events if event.group == "bottom"]
    assert messages[:3] == ["bottom: waits for left and right", "bottom: waits for right", "bottom: SCHEDULING"]


def test_failure_ends_all_downstream_groups_while_siblings_continue() -> None:
    graph = workflow(small("top"), small("middle", "top"), small("bottom", "middle"), small("aside"))
    driver = Driver(graph, behavior=failing("top"))  # type: ignore[arg-type]
    driver.settle()
    driver.advance(2.0)
    assert states(driver) == {"top": FAILED, "middle": FAILED, "bottom": FAILED, "aside": State.RUNNING}
    assert driver.record().state is WorkflowState.RUNNING
    for name, upstream in (("middle", "top"), ("bottom", "middle")):
        one = group(driver, name)
        assert (one.reason, one.status) == (Reason.UPSTREAM, "FAILED_UPSTREAM")
        assert one.tasks[0].status == "FAILED_UPSTREAM"
        assert one.message.startswith(f"upstream group {upstream} did not complete: FAILED")
    driver.run()
    assert states(driver)["aside"] is COMPLETED
    assert (driver.record().state, driver.record().reason) == (WorkflowState.FAILED, Reason.EXIT_CODE)
    assert driver.backend.starts == ["u1/top/t0/0", "u1/aside/t0/0"]


def test_workflow_begins_with_its_first_running_group_after_another_could_not_start() -> None:
    def behave(key: AttemptKey) -> Behavior:
        return Behavior(prepare_error="no such image") if key.group == "one" else Behavior(seconds=60)

    driver = Driver(workflow(small("one"), small("other")), behavior=behave)
    driver.settle()
    assert states(driver) == {"one": FAILED, "other": State.RUNNING}
    assert driver.record().started_at == group(driver, "other").running_at


def test_timeout_of_the_first_group_is_the_reason_of_the_workflow() -> None:
    driver = Driver(workflow(small("top", exec_s=3.0), small("bottom", "top")), behavior=lambda _: HANG)
    driver.run()
    assert group(driver, "bottom").reason is Reason.UPSTREAM
    assert driver.record().reason is Reason.EXEC_TIMEOUT


@pytest.mark.parametrize("at", [0.0, 1.0])
def test_a_cancel_ends_groups_that_run_and_groups_that_wait(at: float) -> None:
    driver = Driver(diamond(), behavior=lambda key: Behavior(seconds=1) if key.group == "top" else HANG)
    driver.settle()
    driver.advance(at)
    driver.cancel(message="wrong data")
    driver.run()
    assert driver.record().state is WorkflowState.CANCELED
    bottom = group(driver, "bottom")
    assert (bottom.state, bottom.reason, bottom.message) == (State.CANCELED, Reason.CANCELED, "canceled by me: wrong data")
    assert {one for name, one in states(driver).items() if name != "top"} == {State.CANCELED}
    assert driver.backend.alive == []


def test_queue_timeout_begins_when_the_upstream_groups_have_completed() -> None:
    driver = Driver(workflow(small("top"), small("bottom", "top", queue_s=5.0)), behavior=lambda _: Behavior(seconds=60))
    began_at = driver.clock.now()
    driver.run()
    assert driver.record().state is WorkflowState.COMPLETED
    assert group(driver, "bottom").scheduling_at == pytest.approx(began_at + 60.0, abs=0.1)


def test_downstream_group_keeps_its_place_before_later_workflows() -> None:
    one_node = pool(node("n1"))
    first = workflow(group_plan("top", 1), group_plan("bottom", 1, after=("top",)))
    driver = Driver(first, workflow(group_plan("other", 1), uuid="u2", at=1.0), on=one_node)
    driver.run()
    assert driver.backend.starts == ["u1/top/t0/0", "u1/bottom/t0/0", "u2/other/t0/0"]


@pytest.mark.parametrize("after_s", [0.0, 1.0, 2.0, 3.0])
def test_next_supervisor_continues_the_graph(after_s: float) -> None:
    driver = Driver(diamond())
    driver.settle()
    driver.clock.advance(after_s)
    driver.backend.tick()
    driver.restart()
    driver.run()
    assert driver.record().state is WorkflowState.COMPLETED
    assert sorted(driver.backend.starts) == sorted(f"u1/{name}/t0/0" for name in ("top", "left", "right", "bottom"))


# -- outputs for other groups


def driver_with_output(*, collect_error: str = "", **seconds: float) -> Driver:
    """``bottom`` gets the output of ``t0`` of ``top``; no group gets that of ``t1``. By default, each group runs one second."""
    bottom = group_plan(
        "bottom", 1, world=False, gpus=0, after=("top",), inputs=(InputSpec(position=1, task="t0", regex="a.*"),)
    )
    # Names of tasks are unique in the workflow.
    bottom = replace(bottom, launches=tuple(replace(launch, task="b") for launch in bottom.launches))
    top = group_plan("top", 2, world=False, gpus=0)

    def behave(key: AttemptKey) -> Behavior:
        return Behavior(seconds=seconds.get(key.group, 1.0), collect_error=collect_error if key.group == "top" else "")

    return Driver(workflow(top, bottom), on=pool(node("n1"), node("n2"), node_lost_after_s=60.0), behavior=behave)


def test_group_completes_when_its_outputs_have_arrived_and_dependent_groups_get_them() -> None:
    driver = driver_with_output()
    driver.settle()
    driver.backend.holds_outputs = True
    driver.advance(1.0)
    top = group(driver, "top")
    assert (top.state, [task.state for task in top.tasks]) == (State.RUNNING, [COMPLETED, COMPLETED])
    assert top.message == "all tasks have ended; copying the output of t0 to this machine for waiting groups"
    assert states(driver)["bottom"] is WAITING
    # The next supervisor requests the output again.
    driver.backend.holds_outputs = False
    driver.restart()
    driver.run()
    assert driver.record().state is WorkflowState.COMPLETED
    # The output of `t1` is not fetched, because no group needs it.
    assert driver.backend.collected == ["u1/top/t0/0"]
    saved = group(driver, "top").task("t0").saved
    assert saved is not None
    (file,) = driver.backend.launches["u1/bottom/b/0"].files
    assert (file.path, file.blob, file.size, file.is_tar, file.only) == ("input/1", saved.digest, 10240, True, "a.*")
    assert any(event.text == "t0: its output was copied to this machine: 10 KiB" for event in driver.events)


def test_output_is_requested_again_if_only_its_own_connection_broke() -> None:
    driver = driver_with_output()
    driver.settle()
    driver.backend.holds_outputs = True
    driver.advance(1.0)
    (command,) = driver.supervisor.in_flight.values()
    driver.backend.holds_outputs = False
    # Nothing else happens: no node becomes unreachable or reachable, and no record changes.
    driver.observations.append(CollectUnanswered(at=driver.clock.now(), key=command.key))
    driver.settle()
    assert driver.backend.collected == ["u1/top/t0/0"]
    driver.run()
    assert driver.record().state is WorkflowState.COMPLETED


def test_output_on_a_shared_file_system_is_not_copied() -> None:
    driver = driver_with_output()
    driver.backend.shares_files = True
    driver.run()
    assert driver.record().state is WorkflowState.COMPLETED
    saved = group(driver, "top").task("t0").saved
    assert saved is not None
    assert driver.backend.launches["u1/bottom/b/0"].files[0].blob == saved.digest
    assert any(event.text == "t0: its output is available on every node: 10 KiB" for event in driver.events)


def test_failed_fetch_of_an_output_fails_its_group_with_the_name_of_the_task() -> None:
    driver = driver_with_output(collect_error="no space left on device")
    driver.run()
    top = group(driver, "top")
    assert (top.state, top.reason, top.status) == (FAILED, Reason.DATA, "FAILED")
    assert top.cause is not None
    assert top.cause.task == "t0"
    assert top.message == "t0: its output cannot be passed on: no space left on device"
    assert group(driver, "bottom").status == "FAILED_UPSTREAM"
    assert driver.record().reason is Reason.DATA


def test_group_waits_a_limited_time_for_a_node_with_its_output() -> None:
    driver = driver_with_output()
    driver.settle()
    node_name = group(driver, "top").task("t0").node
    assert node_name is not None
    driver.backend.holds_outputs = True
    driver.advance(1.0)
    driver.backend.cut(node_name)
    driver.settle()
    assert group(driver, "top").message.endswith(f"; {node_name} is unreachable: cut")
    driver.advance(59.0)
    driver.backend.holds_outputs = False
    assert states(driver)["top"] is State.RUNNING
    driver.backend.heal(node_name)
    driver.run()
    assert driver.record().state is WorkflowState.COMPLETED


def test_a_lost_node_with_an_unfetched_output_fails_the_group() -> None:
    driver = driver_with_output()
    driver.settle()
    node_name = group(driver, "top").task("t0").node
    assert node_name is not None
    driver.backend.holds_outputs = True
    driver.advance(1.0)
    driver.backend.cut(node_name)
    driver.run()
    top = group(driver, "top")
    assert (top.reason, top.status) == (Reason.NODE_LOST, "FAILED_BACKEND_ERROR")
    assert f"t0: its output cannot be passed on: {node_name} has been unreachable for 60 s: cut" in top.message
    assert top.task("t0").state is COMPLETED


def test_a_cancel_does_not_wait_for_an_output() -> None:
    driver = driver_with_output()
    driver.settle()
    driver.backend.holds_outputs = True
    driver.advance(1.0)
    driver.cancel()
    driver.settle()
    assert set(states(driver).values()) == {State.CANCELED}


def test_failed_group_passes_on_no_output() -> None:
    def behave(key: AttemptKey) -> Behavior:
        return Behavior(seconds=1, exit_code=int(key.group == "top" and key.task == "t0"))

    driver = driver_with_output()
    driver.backend._behavior = behave
    driver.run()
    assert group(driver, "top").reason is Reason.EXIT_CODE
    assert driver.backend.collected == []


def test_cancel_after_the_lead_completed_does_not_wait_for_an_output() -> None:
    driver = driver_with_output()
    driver.backend._behavior = lambda key: Behavior(seconds=1) if key.task == "t0" else HANG
    driver.settle()
    driver.backend.holds_outputs = True
    driver.advance(1.0)
    assert group(driver, "top").state is State.STOPPING
    driver.cancel()
    driver.settle()
    assert states(driver) == {"top": COMPLETED, "bottom": State.CANCELED}
    assert driver.record().state is WorkflowState.CANCELED


@pytest.mark.parametrize("succeeds", [True, False])
def test_progress_of_an_output_is_kept_during_its_transfer(succeeds: bool) -> None:
    driver = driver_with_output()
    driver.settle()
    driver.backend.holds_outputs = True
    driver.advance(1.0)
    node_name = group(driver, "top").task("t0").node
    assert node_name is not None
    key = AttemptKey(workflow="u1", group="top", task="t0", attempt=0, node=node_name)
    driver.observations.append(Collecting(at=1.0, key=key, is_packed=True, done=5, total=9, bytes_per_s=1.0))
    driver.settle()
    top = group(driver, "top")
    moving = top.current_transfer(top.task("t0"))
    assert moving is not None
    assert (moving.sent, moving.total, moving.output) == (5, 9, "sends")
    # Progress is not an answer: the command is still in flight.
    assert CommandId(CollectOutput, "u1", "top", "t0", 0) in driver.supervisor.in_flight
    driver.observations.append(
        Collected(at=2.0, key=key, digest="d", size=1) if succeeds else CollectFailed(at=2.0, key=key, message="gone")
    )
    driver.settle()
    assert group(driver, "top").task("t0").transfer is None
    assert archives(driver.record()) == ({"d"} if succeeds else set())
