"""Tasks that end with code 0 although their ranks failed, while others of the world wait for them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from distflow.diagnosis.diagnose import diagnose
from distflow.diagnosis.evidence import case_of
from distflow.lifecycle.states import Reason, State
from distflow.supervisor.group_step import MISSING_RANKS_S
from distflow.testing.backend import Behaviour
from unit.supervisor.gangs import Driver, group_plan, workflow

WORKER = ("u1", "train", "t1")
STACK = ("Traceback (most recent call last):", '  File "/data/train.py", line 3, in <module>', "ValueError: no address")
LABELED = tuple(f"[rank9]: {line}" for line in STACK)
SAID = "t1 ended with exit code 0 although its ranks failed (ValueError: no address); t0 waits for ranks 8-15"


def gang(lines: tuple[str, ...] = STACK, *, after_s: float = 5.0, **plan: bool) -> Driver:
    """A gang whose second task has ended with code 0, and whose first goes on."""
    driver = Driver(
        workflow(group_plan(**plan)),  # type: ignore[arg-type]
        behaviour=lambda key: Behaviour(seconds=after_s if key.task == "t1" else float("inf")),
    )
    driver.output("t1", lines)
    driver.settle()
    driver.advance(after_s)
    assert driver.group().task("t1").state is State.COMPLETED
    return driver


def test_it_is_said_at_once_and_the_group_is_stopped_when_the_others_stay_silent() -> None:
    driver = gang()
    assert (driver.group().state, driver.group().message) == (State.RUNNING, SAID)
    driver.advance(MISSING_RANKS_S - 0.5)
    assert driver.group().state is State.RUNNING
    driver.advance(0.5)
    driver.run()
    group, cause = driver.group(), driver.cause()
    assert (group.state, group.reason, group.task("t0").reason) == (State.FAILED, Reason.EXIT_CODE, Reason.PEER_FAILED)
    assert (cause.task, cause.ranks, cause.exit_code, cause.node) == ("t1", "8-15", 0, group.task("t1").node)
    assert cause.message == "ended with exit code 0 although its ranks failed (ValueError: no address)"
    assert cause.traceback.splitlines() == list(STACK)
    assert [event.text for event in driver.events].count(f"train: {SAID}") == 1


def test_the_diagnosis_names_the_exception_and_the_hidden_exit_code() -> None:
    driver = gang()
    for _ in range(2):  # while it waits, and after its end
        told = diagnose(case_of(driver.group(), 0, {"t1": STACK}, driver.events))
        assert [one.key for one in told] == ["exception", "exit-code-hidden"]
        assert "t1 on n2" in told[0].found
        assert "although its ranks failed (ValueError: no address)" in told[1].found
        driver.run()


def test_tasks_that_make_progress_are_not_stopped() -> None:
    driver = gang()
    for _ in range(4):
        driver.beat("t0")
        driver.advance(MISSING_RANKS_S - 1)
    assert (driver.group().state, driver.group().message) == (State.RUNNING, SAID)
    driver.advance(MISSING_RANKS_S)
    assert driver.group().state is not State.RUNNING


def test_signs_of_life_count_also_where_the_end_is_seen_late() -> None:
    driver = gang(())
    task = driver.group().task("t1")
    # As a supervisor that comes later finds it.
    driver.advance(300)
    driver.output("t1", STACK)
    driver.beat("t0", driver.clock.now() - 1)
    unchecked = driver.record().with_group(driver.group().with_task(replace(task, is_output_checked=False)))
    driver.rewrite(unchecked)
    driver.settle()
    assert driver.group().state is State.RUNNING
    assert driver.group().message == SAID


@pytest.mark.parametrize(("lines", "after_s"), [(LABELED, 5.0), (STACK, 600.0)])
def test_ranks_that_may_have_met_are_only_spoken_of(lines: tuple[str, ...], after_s: float) -> None:
    driver = gang(lines, after_s=after_s)
    assert driver.group().message == SAID
    driver.advance(3600)
    assert driver.group().state is State.RUNNING


def test_ranks_that_fail_while_they_join_have_not_met_however_late() -> None:
    joining = (STACK[0], '  File "/data/train.py", line 3, in <module>', "    dist.init_process_group()", STACK[-1])
    driver = gang(joining, after_s=600.0)
    driver.advance(MISSING_RANKS_S)
    assert driver.group().state is not State.RUNNING


def test_the_spec_decides() -> None:
    driver = gang(stop_on_missing_ranks=False)
    driver.advance(3600)
    assert (driver.group().state, driver.group().message) == (State.RUNNING, SAID)
    driver = gang(LABELED, stop_on_missing_ranks=True)
    driver.advance(MISSING_RANKS_S)
    assert driver.group().state is not State.RUNNING


@pytest.mark.parametrize("lines", [(), ("done",), (*STACK, *["step"] * 30)])
def test_a_task_that_did_its_work_is_no_reason_to_stop(lines: tuple[str, ...]) -> None:
    driver = gang(lines)
    driver.advance(3600)
    assert (driver.group().state, driver.group().message) == (State.RUNNING, "")


def test_tasks_whose_failures_do_not_count_and_groups_without_a_world_are_left_alone() -> None:
    for driver in (gang(ignore=True), gang(world=False, ignore=False)):
        driver.advance(3600)
        assert (driver.group().state, driver.group().message) == (State.RUNNING, "")


def test_a_group_that_completes_all_the_same_has_completed() -> None:
    driver = Driver(workflow(group_plan()), behaviour=lambda key: Behaviour(seconds=5 if key.task == "t1" else 20))
    driver.output("t1", STACK)
    driver.run()
    assert (driver.group().state, driver.group().cause, driver.group().message) == (State.COMPLETED, None, "")


def test_it_is_the_cause_also_when_the_others_give_up_first() -> None:
    driver = Driver(
        workflow(group_plan()),
        behaviour=lambda key: Behaviour(seconds=5) if key.task == "t1" else Behaviour(seconds=20, exit_code=1),
    )
    driver.output("t1", STACK)
    driver.output("t0", ("torch.distributed.DistStoreError: Timed out after 16 seconds waiting for clients.",))
    driver.run()
    assert driver.cause().task == "t1"
