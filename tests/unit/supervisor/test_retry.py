"""Retries of groups: their conditions, their number, the backoff, and the records of earlier attempts."""

from __future__ import annotations

import pytest

from distflow.backends.base import AttemptKey
from distflow.lifecycle.exits import ExitActions
from distflow.lifecycle.states import Reason, State, WorkflowState
from distflow.pools.model import Node
from distflow.spec.model import InputSpec, Retry
from distflow.state.record import OrphanState
from distflow.structs import replace
from distflow.supervisor.decide import decide
from distflow.testing.backend import Behavior
from unit.supervisor.gangs import Driver, group_plan, node, pool, workflow

HANG = Behavior(seconds=float("inf"))
ON_3 = ExitActions(reschedule=((3, 3),))


def failing(attempts: int, exit_code: int = 3, culprit: str = "t1") -> Driver:
    """A gang of two tasks, of which one fails in its first attempts and succeeds in the next."""

    def behave(key: AttemptKey) -> Behavior:
        if key.attempt >= attempts or key.workflow != "u1":
            return Behavior(seconds=5)
        return Behavior(seconds=2, exit_code=exit_code) if key.task == culprit else HANG

    return Driver(
        workflow(group_plan(exit_actions=ON_3, retry=Retry(limit=2, backoff_s=10, max_backoff_s=15))), behavior=behave
    )


def test_whole_gang_is_retried_after_the_backoff() -> None:
    driver = failing(1)
    driver.settle()
    driver.advance(2.0)
    group = driver.group()
    assert (group.state, group.attempt, group.message) == (State.SCHEDULING, 1, "attempt 2 of at most 3 begins in 10 s")
    assert [(task.state, task.attempt, task.node) for task in group.tasks] == [(State.SCHEDULING, 1, None)] * 2
    assert driver.backend.alive == []
    driver.advance(9.9)
    assert driver.group().state is State.SCHEDULING
    driver.advance(0.2)
    assert driver.group().state is State.RUNNING
    assert sorted(driver.backend.alive) == ["u1/train/t0/1", "u1/train/t1/1"]
    driver.run()
    assert driver.record().state is WorkflowState.COMPLETED
    assert len(driver.backend.starts) == 4


def test_node_with_a_failure_is_chosen_last() -> None:
    plan = group_plan(exit_actions=ON_3, retry=Retry(limit=3, backoff_s=1, max_backoff_s=1))
    nodes = [node(name) for name in ("n1", "n2", "n3")]

    def placed(failures: int, *on: Node) -> dict[str, str | None]:
        """Return the nodes of the next attempt after failures of the first task on these nodes."""

        def behave(key: AttemptKey) -> Behavior:
            return Behavior(seconds=1, exit_code=3) if key.attempt < failures and key.task == "t0" else HANG

        driver = Driver(workflow(plan), on=pool(*on), behavior=behave)
        driver.settle()
        for _ in range(failures):
            driver.advance(1.0)
            driver.advance(1.1)
        assert driver.group().attempt == failures
        return {task.name: task.node for task in driver.group().tasks}

    assert placed(0, *nodes) == {"t0": "n1", "t1": "n2"}
    assert placed(1, *nodes) == {"t0": "n2", "t1": "n3"}
    assert placed(2, *nodes) == {"t0": "n3", "t1": "n1"}
    assert placed(1, *nodes[:2]) == {"t0": "n2", "t1": "n1"}


def test_gang_waits_for_other_nodes_instead_of_one_with_too_many_failures() -> None:
    def third_attempt(avoid_after: int, *names: str) -> Driver:
        """Two attempts of u1 have failed on n1, while u2 has n2 for 20 s."""

        def behave(key: AttemptKey) -> Behavior:
            return Behavior(seconds=1, exit_code=3) if key.workflow == "u1" and key.node == "n1" else Behavior(seconds=20)

        retry = Retry(limit=5, backoff_s=1, max_backoff_s=1, avoid_after=avoid_after)
        other = [workflow(group_plan(tasks=1), uuid="u2")] if "n2" in names else []
        mine = workflow(group_plan(tasks=1, exit_actions=ON_3, retry=retry))
        driver = Driver(*other, mine, on=pool(*map(node, names)), behavior=behave)
        driver.settle()
        for _ in range(2):
            driver.advance(1.0)
            driver.advance(1.1)
        assert driver.group().attempt == 2
        return driver

    waiting = third_attempt(2, "n2", "n1")
    assert waiting.group().state is State.SCHEDULING
    assert (
        waiting.group().message
        == "Waiting for nodes: no room for t0: n2: 0 of 8 GPUs free, 8 requested; avoided because earlier attempts failed "
        "there: n1"
    )
    waiting.advance(20.0)
    assert [task.node for task in waiting.group().tasks] == ["n2"]
    # The node is used if no other node can hold the gang, or if `avoid_after` is 0.
    for driver in (third_attempt(2, "n1"), third_attempt(0, "n2", "n1")):
        assert [task.node for task in driver.group().tasks] == ["n1"]


def test_records_of_earlier_attempts_are_kept() -> None:
    driver = failing(1)
    driver.run()
    group = driver.group()
    assert [(task.name, task.attempt, task.status, task.reason, task.exit_code) for task in group.attempts] == [
        ("t0", 1, "COMPLETED", None, 0),
        ("t0", 0, "RESCHEDULED", Reason.PEER_FAILED, 143),
        ("t1", 1, "COMPLETED", None, 0),
        ("t1", 0, "RESCHEDULED", Reason.EXIT_CODE, 3),
    ]
    assert [(cause.task, cause.exit_code) for cause in group.earlier_causes] == [("t1", 3)]
    assert group.cause is None
    assert "train: RESCHEDULED: t1: exit code 3; attempt 2 of at most 3 begins in 10 s" in [
        event.text for event in driver.events
    ]


def test_group_fails_after_the_last_attempt() -> None:
    driver = failing(99)
    driver.run()
    group = driver.group()
    assert (group.state, group.reason, group.attempt) == (State.FAILED, Reason.EXIT_CODE, 2)
    assert group.message == "t1: exit code 3 (attempt 3, the last)"
    assert len(group.earlier_causes) == 2
    assert len(driver.backend.starts) == 6


@pytest.mark.parametrize(("exit_code", "attempts"), [(4, 0), (3, 1)])
def test_only_exit_codes_of_the_spec_are_retried(exit_code: int, attempts: int) -> None:
    driver = failing(1, exit_code)
    driver.run()
    assert driver.group().attempt == attempts


def test_backoff_doubles_up_to_the_maximum() -> None:
    retry = Retry(backoff_s=5, max_backoff_s=60)
    assert [retry.wait_s(attempt) for attempt in range(1, 7)] == [5, 10, 20, 40, 60, 60]
    assert retry.wait_s(100_000) == 60


def test_gang_in_backoff_does_not_block_the_queue() -> None:
    driver = failing(1)
    driver.add(workflow(group_plan(), uuid="u2", at=1.0))
    driver.settle()
    assert driver.group("u2").state is State.SCHEDULING
    driver.advance(2.0)
    assert driver.group().state is State.SCHEDULING
    assert driver.group("u2").state is State.RUNNING
    driver.run()
    assert driver.record().state is driver.record("u2").state is WorkflowState.COMPLETED


def test_backoff_does_not_count_towards_the_queue_timeout() -> None:
    plan = group_plan(exit_actions=ON_3, retry=Retry(backoff_s=100), queue_s=20.0)

    def behave(key: AttemptKey) -> Behavior:
        return Behavior(seconds=1, exit_code=3 if key.attempt == 0 else 0)

    driver = Driver(workflow(plan), behavior=behave)
    driver.run()
    assert driver.record().state is WorkflowState.COMPLETED


def test_group_in_backoff_can_be_canceled() -> None:
    driver = failing(99)
    driver.settle()
    driver.advance(2.0)
    driver.cancel()
    driver.run()
    group = driver.group()
    assert (group.state, group.attempt) == (State.CANCELED, 1)
    assert {task.status for task in group.tasks} == {"FAILED_CANCELED"}
    assert {task.status for task in group.earlier} == {"RESCHEDULED"}


def test_next_supervisor_continues_with_the_current_attempt() -> None:
    driver = failing(1)
    driver.settle()
    driver.advance(2.0)
    driver.restart()
    driver.advance(11.0)
    assert driver.group().state is State.RUNNING
    driver.restart()
    driver.run()
    assert driver.record().state is WorkflowState.COMPLETED
    assert driver.backend.starts.count("u1/train/t0/1") == 1


def test_lost_node_has_exit_code_3001_and_the_next_attempt_runs_on_another_node() -> None:
    nodes = pool(node("n1"), node("n2"), node("n3"), node_lost_after_s=30.0)
    driver = Driver(
        workflow(group_plan(exit_actions=ExitActions(reschedule=((3001, 3001),)), retry=Retry(backoff_s=1))),
        on=nodes,
        behavior=lambda key: Behavior(seconds=5) if key.attempt else HANG,
    )
    driver.settle()
    driver.backend.cut("n2")
    driver.advance(31.0)
    driver.advance(2.0)
    group = driver.group()
    assert (group.state, group.attempt) == (State.RUNNING, 1)
    assert [task.node for task in group.tasks] == ["n1", "n3"]
    lost = group.find("t1", 0)
    assert lost is not None
    assert (lost.status, lost.exit_code, lost.orphan) == ("RESCHEDULED", 3001, OrphanState.UNREACHABLE)
    driver.backend.heal("n2")
    driver.advance(1.0)
    assert driver.backend.alive == ["u1/train/t0/1", "u1/train/t1/1"]  # the orphan attempt on the lost node is stopped
    driver.run()
    lost = driver.group().find("t1", 0)
    assert lost is not None
    assert lost.orphan is None
    assert driver.record().state is WorkflowState.COMPLETED


def test_task_that_cannot_be_prepared_has_exit_code_3003_and_is_retried() -> None:
    def behave(key: AttemptKey) -> Behavior:
        return (
            Behavior(prepare_error="no space left on device") if key.attempt == 0 and key.task == "t1" else Behavior(seconds=1)
        )

    plan = group_plan(exit_actions=ExitActions(reschedule=((3003, 3003),)))
    driver = Driver(workflow(plan), behavior=behave)
    driver.run()
    assert (driver.record().state, driver.group().attempt) == (WorkflowState.COMPLETED, 1)


@pytest.mark.parametrize("world", [True, False])
def test_a_task_that_cannot_be_prepared_fails_its_group_although_its_code_counts_as_success(world: bool) -> None:
    plan = group_plan(world=world, exit_actions=ExitActions(complete=((3003, 3003),)))
    refused = Behavior(prepare_error="no space left on device")
    driver = Driver(workflow(plan), behavior=lambda key: refused if key.task == "t1" else Behavior(seconds=1))
    driver.run()
    assert (driver.group().state, driver.group().reason) == (State.FAILED, Reason.START_ERROR)
    assert (driver.cause().task, driver.cause().message) == ("t1", "no space left on device")


@pytest.mark.parametrize(("code", "attempts"), [(2012, 2), (2010, 1)])
def test_missing_output_of_a_task_that_never_started_has_exit_code_2012(code: int, attempts: int) -> None:
    actions = ExitActions(complete=((3003, 3003),), reschedule=((code, code),))
    top = group_plan("top", 1, world=False, exit_actions=actions, retry=Retry(limit=1, backoff_s=1.0))
    bottom = group_plan("bottom", 1, world=False, after=("top",), inputs=(InputSpec(position=0, task="t0"),))
    unstarted = Behavior(prepare_error="no such image", collect_error="no output")
    driver = Driver(workflow(top, bottom), behavior=lambda _: unstarted)
    driver.run()
    assert (driver.group().attempt + 1, driver.cause().reason) == (attempts, Reason.DATA)


def test_exec_timeout_is_not_retried_by_any_exit_code() -> None:
    plan = group_plan(exit_actions=ExitActions(reschedule=((0, 9999),)), exec_s=3.0)
    driver = Driver(workflow(plan), behavior=lambda _: HANG)
    driver.run()
    assert (driver.group().reason, driver.group().attempt) == (Reason.EXEC_TIMEOUT, 0)


def test_a_failure_counts_as_success_if_exit_actions_say_so() -> None:
    plan = group_plan(exit_actions=ExitActions(complete=((3, 3),)))
    driver = Driver(workflow(plan), behavior=lambda _: Behavior(seconds=1, exit_code=3))
    driver.run()
    task = driver.group().task("t0")
    assert driver.record().state is WorkflowState.COMPLETED
    assert (task.state, task.exit_code, task.message) == (State.COMPLETED, 3, "exit code 3: counts as success (exitActions)")


def test_a_success_counts_as_failure_if_exit_actions_say_so() -> None:
    plan = group_plan(exit_actions=ExitActions(fail=((0, 0),)))
    driver = Driver(workflow(plan), behavior=lambda _: Behavior(seconds=1))
    driver.run()
    assert driver.group().reason is Reason.EXIT_CODE
    assert driver.cause().message == "exit code 0: counts as failure (exitActions)"


def test_exit_actions_do_not_apply_to_a_task_that_was_stopped_because_the_lead_completed() -> None:
    plan = group_plan(world=False, exit_actions=ExitActions(fail=((0, 0),)))
    actions = (replace(plan.launches[0], exit_actions=ExitActions()), plan.launches[1])

    def behave(key: AttemptKey) -> Behavior:
        return Behavior(seconds=1) if key.task == "t0" else HANG

    driver = Driver(workflow(replace(plan, launches=actions)), behavior=behave)
    driver.run()
    assert driver.group().task("t1").state is State.COMPLETED


def test_a_decision_about_an_unchanged_snapshot_changes_no_record() -> None:
    driver = failing(1)
    driver.settle()
    driver.advance(2.0)
    assert decide(driver.supervisor.snapshot(), driver.clock.now()).records == {}
