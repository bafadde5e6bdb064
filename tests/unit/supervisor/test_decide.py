"""Decisions about gangs: starts, failures, cancellations, timeouts, lost nodes, leases, and the order of the queue."""

from __future__ import annotations

import pytest

from distflow.backends.base import AttemptKey, Ended, LeaseRequest, LogComplete, Staging
from distflow.lifecycle.clocks import Clock
from distflow.lifecycle.exits import ExitActions
from distflow.lifecycle.states import Reason, State, WorkflowState
from distflow.spec.model import Retry
from distflow.state.record import OrphanState
from distflow.structs import replace
from distflow.supervisor.commands import Lease, Stop
from distflow.supervisor.decide import decide
from distflow.testing.backend import Behavior
from unit.supervisor.gangs import Driver, group_plan, node, pool, workflow

HANG = Behavior(seconds=float("inf"))


def test_a_gang_completes_when_all_its_tasks_do() -> None:
    driver = Driver(workflow())
    driver.run()
    assert driver.record().state is WorkflowState.COMPLETED
    assert [task.node for task in driver.group().tasks] == ["n1", "n2"]
    assert driver.backend.alive == []


def test_no_task_starts_if_one_cannot_be_prepared() -> None:
    def refuse_second(key: AttemptKey) -> Behavior:
        return Behavior(prepare_error="no space left on device") if key.task == "t1" else HANG

    driver = Driver(workflow(), behavior=refuse_second)
    driver.run()
    assert driver.backend.starts == []
    assert driver.group().reason is Reason.START_ERROR
    assert driver.cause().task == "t1"
    assert driver.backend.alive == []


@pytest.mark.parametrize("culprit", ["t0", "t1"])
def test_one_failure_stops_the_world_and_is_the_cause(culprit: str) -> None:
    def behave(key: AttemptKey) -> Behavior:
        return Behavior(seconds=2, exit_code=3) if key.task == culprit else HANG

    driver = Driver(workflow(), behavior=behave)
    driver.run()
    group = driver.group()
    assert (group.state, group.reason) == (State.FAILED, Reason.EXIT_CODE)
    assert (driver.cause().task, driver.cause().exit_code) == (culprit, 3)
    other = next(task for task in group.tasks if task.name != culprit)
    assert (other.state, other.reason) == (State.FAILED, Reason.PEER_FAILED)
    assert driver.backend.alive == []


def test_a_gang_fails_if_each_of_its_tasks_reports_a_failed_peer() -> None:
    driver = Driver(workflow(), behavior=lambda _: HANG)
    driver.settle()
    for task, node_name in (("t0", "n1"), ("t1", "n2")):
        key = AttemptKey(workflow="u1", group="train", task=task, attempt=0, node=node_name)
        end = {"reason": "peer_failed", "exit_code": 143, "message": f"stopped because {task} failed"}
        driver.observations += [Ended(at=driver.clock.now(), key=key, end=end), LogComplete(at=driver.clock.now(), key=key)]
    driver.settle()
    assert (driver.group().state, driver.cause().message) == (State.FAILED, "stopped because t0 failed")


def test_first_failure_is_the_cause_although_the_clock_of_its_node_is_fast() -> None:
    """By the clocks of their nodes, the task that failed first would seem to have failed last."""

    def behave(key: AttemptKey) -> Behavior:
        return Behavior(seconds=2, exit_code=3) if key.task == "t1" else Behavior(seconds=2.5, exit_code=4)

    clocks = {"n1": Clock(offset_s=-40.0, uncertainty_s=0.01), "n2": Clock(offset_s=60.0, uncertainty_s=0.01)}
    driver = Driver(workflow(), behavior=behave, clocks=clocks)
    driver.settle()
    began = driver.clock.now()
    # Both tasks have failed before the supervisor observes one of the ends.
    driver.backend.cut("n1")
    driver.backend.cut("n2")
    driver.advance(3.0)
    driver.backend.heal("n1")
    driver.backend.heal("n2")
    driver.run()
    assert (driver.cause().task, driver.cause().at) == ("t1", began + 2.0)
    assert [task.started_at for task in driver.group().tasks] == [began, began]


def test_task_that_ignores_term_gets_its_grace_period() -> None:
    def behave(key: AttemptKey) -> Behavior:
        return Behavior(seconds=1, exit_code=1) if key.task == "t0" else Behavior(seconds=float("inf"), obeys_term=False)

    driver = Driver(workflow(), on=pool(peer_failed_grace_s=5.0), behavior=behave)
    driver.settle()
    driver.advance(1.0)
    assert driver.group().state is State.STOPPING
    driver.advance(4.9)
    assert driver.group().state is State.STOPPING
    driver.advance(0.2)
    assert driver.group().state is State.FAILED


def test_failed_helper_is_ignored_if_the_spec_says_so() -> None:
    def behave(key: AttemptKey) -> Behavior:
        return Behavior(seconds=1, exit_code=1) if key.task == "t1" else Behavior(seconds=5)

    driver = Driver(workflow(group_plan(world=False)), behavior=behave)
    driver.run()
    assert driver.group().state is State.COMPLETED
    assert driver.group().task("t1").state is State.FAILED


def test_a_helper_that_fails_before_the_lead_has_started_is_ignored_too() -> None:
    def behave(key: AttemptKey) -> Behavior:
        return Behavior(seconds=0, exit_code=9) if key.task == "t1" else Behavior(seconds=5)

    driver = Driver(workflow(group_plan(world=False, barrier=False)), behavior=behave)
    _prepare_and_cut_n1(driver)
    driver.advance(1.0)
    assert (driver.group().state, driver.group().task("t1").state) == (State.INITIALIZING, State.FAILED)
    driver.backend.heal("n1")
    driver.run()
    assert driver.group().state is State.COMPLETED
    assert driver.group().task("t0").state is State.COMPLETED


def test_a_helper_that_cannot_be_started_at_all_fails_its_group() -> None:
    def behave(key: AttemptKey) -> Behavior:
        return Behavior(prepare_error="no such image") if key.task == "t1" else Behavior(seconds=5)

    driver = Driver(workflow(group_plan(world=False)), behavior=behave)
    driver.run()
    assert driver.group().state is State.FAILED
    assert driver.cause().task == "t1"


def test_failed_helper_that_is_ignored_is_not_the_cause_if_another_helper_cannot_start() -> None:
    def behave(key: AttemptKey) -> Behavior:
        return {"t1": Behavior(seconds=0, exit_code=3), "t2": Behavior(prepare_error="no such image")}.get(key.task, HANG)

    actions = ExitActions(reschedule=((3, 3),))
    plan = group_plan(tasks=3, gpus=0, world=False, barrier=False, exit_actions=actions, retry=Retry(limit=1))
    driver = Driver(workflow(plan), behavior=behave)
    original = driver.backend.prepare

    def hold_back(key: AttemptKey, *rest: object) -> None:
        if key.task != "t2" or driver.group().task("t1").state is State.FAILED:
            original(key, *rest)  # type: ignore[arg-type]

    driver.backend.prepare = hold_back  # type: ignore[method-assign,assignment]
    driver.settle()
    driver.advance(1.0)
    driver.restart()  # repeats the command that was held back
    driver.run()
    assert driver.group().task("t1").started_at is not None
    assert (driver.group().attempt, driver.cause().task, driver.cause().message) == (0, "t2", "no such image")


def test_refused_gang_fails_although_its_node_has_no_attempt_to_stop() -> None:
    def behave(key: AttemptKey) -> Behavior:
        driver.backend.forget(key.node)
        return Behavior(prepare_error="no space left on device")

    driver = Driver(workflow(group_plan(tasks=1)), behavior=behave)
    driver.run()
    assert (driver.record().state, driver.record().reason) == (WorkflowState.FAILED, Reason.START_ERROR)
    assert (driver.cause().task, driver.cause().message) == ("t0", "no space left on device")
    assert driver.group().task("t0").node == "n1"


def test_lead_that_completes_ends_helpers() -> None:
    driver = Driver(workflow(group_plan(world=False)), behavior=lambda key: Behavior(seconds=1) if key.task == "t0" else HANG)
    driver.run()
    assert driver.group().state is State.COMPLETED
    helper = driver.group().task("t1")
    assert helper.state is State.COMPLETED
    assert "lead completed" in helper.message
    assert driver.backend.alive == []


def test_ends_with_lead_ends_the_other_tasks_but_their_failures_count() -> None:
    plan = replace(group_plan(), ends_with_lead=True)
    driver = Driver(workflow(plan), behavior=lambda key: Behavior(seconds=1) if key.task == "t0" else HANG)
    driver.run()
    assert driver.group().state is State.COMPLETED
    assert driver.backend.alive == []

    driver = Driver(workflow(plan), behavior=lambda key: HANG if key.task == "t0" else Behavior(seconds=1, exit_code=3))
    driver.run()
    assert driver.group().state is State.FAILED
    assert (driver.cause().task, driver.cause().exit_code) == ("t1", 3)


def test_a_world_waits_for_its_workers_after_the_lead_completed() -> None:
    driver = Driver(workflow(), behavior=lambda key: Behavior(seconds=1 if key.task == "t0" else 9))
    driver.settle()
    driver.advance(2.0)
    assert driver.group().state is State.RUNNING
    driver.advance(8.0)
    assert driver.group().state is State.COMPLETED


def test_cancel_stops_all_tasks_and_is_not_a_failure() -> None:
    driver = Driver(workflow(), behavior=lambda _: HANG)
    driver.settle()
    driver.cancel(message="wrong data")
    driver.run()
    assert driver.record().state is WorkflowState.CANCELED
    assert "wrong data" in driver.group().message
    assert all(task.state is State.CANCELED for task in driver.group().tasks)
    assert driver.backend.alive == []


def test_cancel_of_a_waiting_workflow_takes_no_node() -> None:
    driver = Driver(workflow(), workflow(uuid="u2", at=1.0), behavior=lambda _: HANG)
    driver.settle()
    driver.cancel("u2")
    driver.settle()
    assert driver.record("u2").state is WorkflowState.CANCELED
    assert len(driver.backend.starts) == 2


def test_exec_timeout_ends_a_gang_that_runs_too_long() -> None:
    driver = Driver(workflow(group_plan(exec_s=60)), behavior=lambda _: HANG)
    driver.run()
    assert (driver.group().state, driver.group().reason) == (State.FAILED, Reason.EXEC_TIMEOUT)
    assert driver.record().status == "FAILED_EXEC_TIMEOUT"
    assert driver.backend.alive == []


def test_queue_timeout_ends_a_gang_that_waits_too_long() -> None:
    driver = Driver(workflow(), workflow(group_plan(queue_s=30), uuid="u2", at=1.0), behavior=lambda _: HANG)
    driver.settle()
    driver.advance(29)
    assert driver.group("u2").state is State.SCHEDULING
    driver.advance(2)
    assert driver.record("u2").status == "FAILED_QUEUE_TIMEOUT"
    assert "Waiting for" not in driver.group("u2").message


def test_a_gang_that_its_pool_can_never_hold_fails_at_once() -> None:
    driver = Driver(workflow(group_plan(tasks=3)), workflow(group_plan(tasks=1), uuid="u2", at=1.0))
    driver.settle()
    assert driver.record().status == "FAILED_START_ERROR"
    assert "cannot run it, even when idle: no room for t2" in driver.group().message
    # No other gang waits behind the failed one.
    assert driver.group("u2").state is not State.SCHEDULING


def test_gangs_start_in_order_and_smaller_ones_do_not_overtake() -> None:
    small = group_plan("small", 1, gpus=1)
    driver = Driver(
        workflow(group_plan("first", 1)), workflow(uuid="u2", at=1.0), workflow(small, uuid="u3", at=2.0),
        behavior=lambda _: Behavior(seconds=10),
    )  # fmt: skip
    driver.settle()
    assert driver.backend.starts == ["u1/first/t0/0"]
    assert "behind w-2" in driver.group("u3").message
    assert driver.group("u2").message
    driver.run()
    assert [name.split("/")[0] for name in driver.backend.starts] == ["u1", "u2", "u2", "u3"]


def test_a_fixed_port_is_not_shared_on_one_node() -> None:
    on = pool(node("n1", 16))
    one, two = group_plan(tasks=1, gpus=1, port=29500), group_plan(tasks=1, gpus=1, port=29500)
    driver = Driver(workflow(one), workflow(two, uuid="u2", at=1.0), on=on, behavior=lambda _: Behavior(seconds=5))
    driver.settle()
    assert len(driver.backend.starts) == 1
    driver.run()
    assert len(driver.backend.starts) == 2


def test_the_start_barrier_names_the_straggler() -> None:
    driver = Driver(workflow(), on=pool(start_barrier_s=20.0, node_lost_after_s=600.0), behavior=lambda _: HANG)
    driver.backend.cut("n2")
    driver.settle()
    assert driver.group().state is State.SCHEDULING
    driver.backend.heal("n2")
    original = driver.backend.prepare

    def cut_first(*args: object) -> None:
        driver.backend.cut("n2")
        original(*args)  # type: ignore[arg-type]

    driver.backend.prepare = cut_first  # type: ignore[method-assign,assignment]
    driver.settle()
    assert driver.group().state is State.INITIALIZING
    driver.advance(21)
    assert driver.group().stop_reason is Reason.START_TIMEOUT
    assert "t1 on n2" in driver.group().message
    assert driver.backend.starts == []


def test_the_start_barrier_waits_while_files_are_copied() -> None:
    driver = Driver(workflow(), on=pool(start_barrier_s=20.0), behavior=lambda _: HANG)
    driver.backend.prepare = lambda *_: None  # type: ignore[method-assign]
    driver.settle()
    slow = AttemptKey(workflow="u1", group="train", task="t1", attempt=0, node="n2")
    for second in (15, 30):
        driver.clock.advance(15)
        driver.observations.append(Staging(at=driver.clock.now(), key=slow, sent=second, total=100, bytes_per_s=1.0))
        driver.settle()
        assert driver.group().state is State.INITIALIZING
    driver.advance(19)
    assert driver.group().state is State.INITIALIZING
    driver.advance(2)
    assert driver.group().stop_reason is Reason.START_TIMEOUT


def test_unreachable_node_is_lost_only_after_node_lost_after() -> None:
    driver = Driver(workflow(), on=pool(node_lost_after_s=120.0), behavior=lambda _: HANG)
    driver.settle()
    driver.backend.cut("n2")
    driver.advance(119)
    assert driver.group().state is State.RUNNING
    driver.advance(2)
    driver.settle()
    assert driver.group().task("t1").reason is Reason.NODE_LOST
    assert driver.cause().task == "t1"


def test_node_is_not_given_up_while_its_engine_does_not_answer() -> None:
    driver = Driver(workflow(), on=pool(node_lost_after_s=120.0), behavior=lambda _: HANG)
    driver.settle()
    driver.backend.cut("n2", is_engine_away=True)
    driver.advance(3600)
    assert driver.group().state is State.RUNNING
    driver.backend.cut("n2")  # now the engine answers that the node is still allocated
    driver.advance(119)
    assert driver.group().state is State.RUNNING
    driver.advance(2)
    driver.settle()
    assert driver.group().task("t1").reason is Reason.NODE_LOST


def test_canceled_workflow_ends_although_its_engine_does_not_answer() -> None:
    driver = Driver(workflow(), on=pool(node_lost_after_s=120.0), behavior=lambda _: HANG)
    driver.settle()
    driver.backend.cut("n2", is_engine_away=True)
    driver.cancel()
    driver.advance(121)
    driver.settle()
    assert driver.group().state is State.CANCELED
    assert driver.group().task("t1").orphan is OrphanState.UNREACHABLE


def with_lost_node(*, retention_s: float) -> Driver:
    """Return a gang that failed because its node n2 was unreachable for too long."""
    driver = Driver(workflow(), on=pool(node_lost_after_s=120.0, retention_s=retention_s), behavior=lambda _: HANG)
    driver.settle()
    driver.backend.cut("n2")
    driver.advance(121)
    driver.settle()
    return driver


@pytest.mark.parametrize("killed", [False, True])
def test_orphan_attempt_is_stopped_when_its_node_is_back(killed: bool) -> None:
    driver = with_lost_node(retention_s=14 * 86400.0)
    assert driver.group().state is State.FAILED
    assert driver.group().task("t1").orphan is OrphanState.UNREACHABLE
    assert driver.backend.alive == ["u1/train/t1/0"]
    if killed:
        driver.restart()
    driver.backend.heal("n2")
    driver.settle()
    driver.advance(1)
    assert driver.backend.alive == []
    assert driver.group().task("t1").orphan is None
    assert driver.group().task("t1").reason is Reason.NODE_LOST
    assert any("the abandoned attempt on n2 has ended" in event.text for event in driver.events)


def test_node_that_never_returns_is_given_up_after_the_retention() -> None:
    driver = with_lost_node(retention_s=86400.0)
    driver.advance(86401)
    assert driver.group().task("t1").orphan is None
    assert driver.events[-1].text == "t1: the abandoned attempt on n2 was not stopped: the node stayed unreachable"


def test_orphan_that_its_node_was_stopping_is_given_up_without_an_event() -> None:
    driver = with_lost_node(retention_s=86400.0)
    snapshot = driver.supervisor.snapshot()
    (loaded,) = snapshot.workflows
    group = driver.group().with_task(replace(driver.group().task("t1"), orphan=OrphanState.STOPPING))
    stopping = replace(loaded, record=loaded.record.with_group(group))
    decision = decide(replace(snapshot, workflows=(stopping,)), driver.clock.now() + 86401)
    assert decision.records["u1"].group("train").task("t1").orphan is None
    assert decision.events == []


def test_group_waits_a_limited_time_for_output_on_a_lost_node() -> None:
    driver = Driver(workflow(), on=pool(retention_s=86400.0), behavior=lambda _: Behavior(seconds=5.0))
    driver.settle()
    driver.clock.advance(5.0)
    driver.backend.tick()
    # The node reports the end of its task, and is lost before it has sent the rest of the output.
    delivered = [one for one in driver.observations if not (isinstance(one, LogComplete) and one.key.node == "n2")]
    driver.observations.clear()
    driver.observations.extend(delivered)
    driver.backend.cut("n2")
    driver.settle()
    driver.advance(86000.0)
    assert driver.record().state is WorkflowState.COMPLETED
    assert not driver.group().task("t1").log_complete  # the node may still return
    driver.advance(400.0)
    assert driver.group().task("t1").log_complete
    assert not any("was not stopped" in event.text for event in driver.events)  # it had ended by itself


def test_short_network_failure_changes_nothing() -> None:
    driver = Driver(workflow(), behavior=lambda _: Behavior(seconds=100))
    driver.settle()
    driver.backend.cut("n2")
    driver.advance(60)
    driver.backend.heal("n2")
    driver.run()
    assert driver.record().state is WorkflowState.COMPLETED
    assert len(driver.backend.starts) == 2


def test_end_of_a_task_while_no_supervisor_runs_is_read_from_the_node() -> None:
    driver = Driver(workflow(), behavior=lambda key: Behavior(seconds=5, exit_code=0 if key.task == "t0" else 7))
    driver.settle()
    driver.clock.advance(60)
    driver.backend.tick()
    driver.restart()
    driver.run()
    assert driver.cause().exit_code == 7


def test_group_that_ended_while_no_supervisor_ran_still_waits_for_its_output() -> None:
    driver = Driver(workflow(), behavior=lambda _: Behavior(seconds=5))
    driver.settle()
    driver.clock.advance(60)
    driver.backend.tick()
    driver.restart()
    output = [one for one in driver.observations if isinstance(one, LogComplete)]
    others = [one for one in driver.observations if not isinstance(one, LogComplete)]
    assert len(output) == 2
    driver.observations.clear()
    driver.observations.extend(others)
    driver.settle()
    assert not driver.record().state.is_final
    driver.observations.extend(output)
    driver.settle()
    assert driver.record().state is WorkflowState.COMPLETED


def test_lease_that_expired_before_the_start_is_requested_again() -> None:
    driver = Driver(workflow(), behavior=lambda _: Behavior(seconds=1))
    original = driver.backend.prepare
    lost: list[AttemptKey] = []

    def lose_once(key: AttemptKey, *rest: object) -> None:
        if not lost:
            lost.append(key)
            for node in ("n1", "n2"):
                driver.backend.forget(node)
        original(key, *rest)  # type: ignore[arg-type]

    driver.backend.prepare = lose_once  # type: ignore[method-assign,assignment]
    driver.run()
    assert lost
    assert driver.record().state is WorkflowState.COMPLETED
    assert len(driver.backend.starts) == 2


def test_time_with_a_lease_does_not_count_towards_the_queue_timeout() -> None:
    cuts = ["n2"]

    def cut_once(key: AttemptKey) -> Behavior:
        if key.node in cuts:
            cuts.remove(key.node)
            driver.backend.cut(key.node)
        return HANG

    driver = Driver(workflow(group_plan(queue_s=60.0)), behavior=cut_once)
    driver.settle()
    driver.advance(100.0)
    assert driver.group().state is State.INITIALIZING
    driver.backend.expire("u1/train/t1/0")
    driver.backend.heal("n2")
    driver.settle()
    assert driver.group().message == "its lease was lost before the start; queued again"
    driver.advance(2.0)
    assert driver.group().state is State.RUNNING


def test_remaining_part_of_a_lost_lease_is_released_before_the_next_request() -> None:
    driver = Driver(workflow(), behavior=lambda _: Behavior(seconds=1))
    original = driver.backend.prepare
    lost: list[str] = []

    def expire_once(key: AttemptKey, *rest: object) -> None:
        if key.task == "t1" and not lost:
            lost.append(key.name)
            driver.backend.expire(key.name)
            return
        original(key, *rest)  # type: ignore[arg-type]

    driver.backend.prepare = expire_once  # type: ignore[method-assign,assignment]
    driver.settle()
    assert lost
    assert driver.group().state is State.SCHEDULING
    assert driver.backend.alive == []
    driver.run()
    assert driver.record().state is WorkflowState.COMPLETED
    assert len(driver.backend.starts) == 2


def test_forced_cancel_skips_the_grace_period() -> None:
    driver = Driver(workflow(), behavior=lambda _: Behavior(seconds=float("inf"), obeys_term=False))
    driver.settle()
    driver.cancel(force=True)
    driver.settle()
    driver.advance(0.0)
    assert driver.record().state is WorkflowState.CANCELED


def test_forced_cancel_ends_a_grace_period_that_has_begun() -> None:
    driver = Driver(
        workflow(), behavior=lambda _: Behavior(seconds=float("inf"), obeys_term=False), on=pool(stop_grace_s=600.0)
    )
    driver.settle()
    driver.cancel()
    driver.advance(5.0)
    assert {task.state for task in driver.group().tasks} == {State.STOPPING}
    driver.cancel(force=True)
    driver.advance(0.0)
    driver.advance(0.0)
    assert driver.record().state is WorkflowState.CANCELED


def test_cpus_are_counted_although_nodes_do_not_lock_them() -> None:
    plans = [group_plan(tasks=1, gpus=0, cpus=5, world=False) for _ in range(2)]
    driver = Driver(
        workflow(plans[0]), workflow(plans[1], uuid="u2", at=1.0), on=pool(node("n1", cpus=8)),
        behavior=lambda _: Behavior(seconds=10),
    )  # fmt: skip
    driver.settle()
    assert len(driver.backend.starts) == 1
    assert "3 of 8 CPUs free, 5 requested" in driver.group("u2").message
    driver.run()
    assert len(driver.backend.starts) == 2


def test_command_in_flight_is_not_repeated() -> None:
    driver = Driver(workflow())
    driver.observe()
    first = driver.supervisor.decide()
    assert [type(command) for command in first.commands] == [Lease]
    driver.supervisor.in_flight = {command.id: command for command in first.commands}
    assert driver.supervisor.decide().commands == []


def _prepare_and_cut_n1(driver: Driver) -> None:
    """Let all tasks be prepared, and cut the connection to the lead's node before the start."""
    original = driver.backend.prepare

    def cut_the_first(*args: object) -> None:
        original(*args)  # type: ignore[arg-type]
        if getattr(args[0], "task", "") == "t1":
            driver.backend.cut("n1")

    driver.backend.prepare = cut_the_first  # type: ignore[method-assign,assignment]
    driver.settle()
    assert all(task.prepared for task in driver.group().tasks)


def test_node_that_is_lost_before_the_start_prevents_the_start_of_the_others() -> None:
    driver = Driver(workflow(), behavior=lambda _: HANG)
    _prepare_and_cut_n1(driver)
    assert driver.backend.starts == []
    driver.backend.heal("n1")
    driver.settle()
    assert driver.group().state is State.RUNNING
    assert len(driver.backend.starts) == 2


def test_start_barrier_names_unreachable_nodes() -> None:
    driver = Driver(workflow(), on=pool(start_barrier_s=20.0, node_lost_after_s=600.0), behavior=lambda _: HANG)
    _prepare_and_cut_n1(driver)
    driver.advance(21)
    assert driver.group().message == "not ready within 20 s: t0 on n1, which is unreachable"


def test_nodes_hold_a_lease_longer_than_the_start_barrier() -> None:
    # The supervisor must give up before the nodes, because it decides about a late gang.
    driver = Driver(workflow(), on=pool(start_barrier_s=20.0))
    driver.observe()
    command = next(one for one in driver.supervisor.decide().commands if isinstance(one, Lease))
    assert command.request.start_timeout_s >= 30.0


def test_silent_gang_is_reported_and_continues() -> None:
    driver = Driver(workflow(group_plan(hang_s=30)), behavior=lambda _: HANG)
    began = driver.clock.now()
    assert driver.settle() == began + 30
    driver.beat("t1", began + 20)
    driver.advance(49.0)
    assert driver.group().message == ""
    driver.advance(1.0)
    message = "may hang: no task has printed anything or sent a heartbeat for 30 s (hang_timeout)"
    message += "; to show the stacks of its processes: distflow workflow stacks w-1"
    assert (driver.group().state, driver.group().message) == (State.RUNNING, message)
    driver.advance(100.0)
    assert [event.text for event in driver.events].count(f"train: {message}") == 1
    last_beat_at = driver.clock.now()
    driver.beat("t0")
    wake_at = driver.settle()
    assert wake_at is not None
    driver.clock.advance(wake_at - driver.clock.now())
    assert driver.settle() == last_beat_at + 30
    assert driver.group().message == ""
    assert driver.events[-1].text == "train: makes progress again"
    assert [event.code for event in driver.events if "hang" in (event.code or "")] == ["hang", "hang_over"]
    # An unreachable node sends no output, so its silence shows nothing about the gang.
    driver.backend.cut("n1")
    driver.advance(40.0)
    assert driver.group().message == ""


def test_only_changed_workflows_are_decided_again() -> None:
    gangs = [workflow(group_plan(tasks=1, gpus=1), uuid=f"u{number}") for number in range(3)]
    driver = Driver(*gangs, behavior=lambda _: HANG)
    driver.settle()
    before = driver.supervisor.snapshot().last_decision.views
    driver.backend.kill(driver.backend.running[1].name)
    driver.settle()
    after = driver.supervisor.snapshot().last_decision.views
    assert [after[uuid] is before[uuid] for uuid in ("u0", "u1", "u2")] == [True, False, True]
    # A node that becomes unreachable or reachable may concern all workflows.
    driver.backend.cut("n1")
    driver.settle()
    assert not any(driver.supervisor.snapshot().last_decision.views[uuid] is after[uuid] for uuid in ("u0", "u2"))


def test_all_workflows_are_decided_again_after_the_clock_is_set_back() -> None:
    driver = Driver(workflow(), behavior=lambda _: HANG)
    driver.settle()
    before = driver.supervisor.snapshot().last_decision.views["u1"]
    driver.clock.advance(-3600.0)
    driver.settle()
    assert driver.supervisor.snapshot().last_decision.views["u1"] is not before


def _lease_for_another_supervisor(driver: Driver, *nodes: str) -> None:
    """Lease these nodes for another supervisor."""
    driver.observe()
    for name in nodes:
        driver.backend.lease(
            LeaseRequest(
                workflow="theirs", group=name, attempt=0, nodes={"t": name}, gpus={"t": 8}, master="t", port=None,
                start_timeout_s=60.0,
            )
        )  # fmt: skip
    driver.observations.clear()


def test_another_node_replaces_a_node_that_refuses() -> None:
    driver = Driver(workflow(group_plan(tasks=1)), behavior=lambda _: HANG)
    _lease_for_another_supervisor(driver, "n1")
    driver.settle()
    assert (driver.group().state, driver.group().tasks[0].node) == (State.RUNNING, "n2")
    assert driver.group().refusals == ()


def test_refusing_nodes_are_retried_after_a_while_and_the_first_free_one_is_used() -> None:
    driver = Driver(workflow(group_plan(tasks=1)), behavior=lambda _: HANG)
    _lease_for_another_supervisor(driver, "n1", "n2")
    wake_at = driver.settle()
    assert wake_at == driver.clock.now() + 1.0
    assert driver.group().message == "Waiting for nodes: n1: busy; n2: busy"
    driver.advance(1.0)
    # After the second refusal, distflow waits longer for the next request, and the known message is not repeated.
    assert [one.until - driver.clock.now() for one in driver.group().refusals] == [2.0, 2.0]
    assert len([event for event in driver.events if "n1: busy" in event.text]) == 2
    driver.backend.release(AttemptKey(workflow="theirs", group="n2", task="t", attempt=0, node="n2"))
    driver.observations.clear()
    driver.advance(2.0)
    assert (driver.group().state, driver.group().tasks[0].node) == (State.RUNNING, "n2")


def test_gang_that_needs_a_refusing_node_waits_without_holding_others() -> None:
    driver = Driver(workflow(group_plan(tasks=2)), workflow(group_plan(tasks=1), uuid="u2"), behavior=lambda _: HANG)
    _lease_for_another_supervisor(driver, "n2")
    driver.settle()
    assert driver.group().state is State.SCHEDULING
    assert driver.backend.alive == ["theirs/n2/t/0"]
    # Later gangs do not overtake it.
    assert driver.group("u2").message == "Waiting for nodes: behind w-1"


def test_node_gets_no_new_task_before_its_orphan_attempt_is_stopped() -> None:
    plan = group_plan(tasks=1, gpus=0, world=False, exit_actions=ExitActions(reschedule=((3001, 3001),)))
    driver = Driver(workflow(plan), on=pool(node("n1"), node_lost_after_s=30.0), behavior=lambda _: HANG)
    driver.settle()
    driver.backend.cut("n1")
    driver.advance(31.0)
    driver.advance(10.0)
    assert (driver.group().attempt, driver.group().state) == (1, State.SCHEDULING)
    driver.backend.heal("n1")
    driver.observe()
    assert [(type(command), command.key.attempt) for command in driver.supervisor.decide().commands] == [(Stop, 0)]
    assert "t0: n1: an earlier attempt is being stopped there" in driver.supervisor.decide().records["u1"].groups[0].message
    driver.settle()
    assert (driver.group().state, driver.backend.running) == (
        State.RUNNING, [AttemptKey(workflow="u1", group="train", task="t0", attempt=1, node="n1")],
    )  # fmt: skip
    assert driver.backend.starts == ["u1/train/t0/0", "u1/train/t0/1"]


def test_a_port_that_another_gang_uses_is_named() -> None:
    driver = Driver(workflow(group_plan(tasks=1, gpus=1, port=29500)), on=pool(node("n1")), behavior=lambda _: HANG)
    driver.add(workflow(group_plan(tasks=1, gpus=1, port=29500), uuid="u2"))
    driver.settle()
    assert driver.group("u2").message == "Waiting for nodes: no room for t0: n1: port 29500 is taken"
