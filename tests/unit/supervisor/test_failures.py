"""The final states of tasks, and the first cause of a failure."""

from __future__ import annotations

import pytest

from distflow.diagnosis.diagnose import diagnose, group_outcome_of
from distflow.lifecycle.clocks import Clock
from distflow.lifecycle.states import Reason, State
from distflow.protocol.ends import EndReason
from distflow.state.codec import decode
from distflow.state.ends import PrintedLine
from distflow.state.record import End, GroupRecord, TaskRecord
from distflow.structs import replace
from distflow.supervisor.failures import conclude, end_from, first_cause, with_own_failures
from distflow.supervisor.group_step import MISSING_RANKS_S
from distflow.testing.backend import Behavior
from unit.supervisor.gangs import Driver, group_plan, workflow

STOPPED = EndReason.STOPPED
RUNNING = GroupRecord(name="g", tasks=(), state=State.RUNNING)
TIME_LIMIT = End(ended_at=1, reason=EndReason.ALLOCATION_OVER, allocation=Reason.EXEC_TIMEOUT)


def _stopping(reason: Reason | None, failed: Reason = Reason.PEER_FAILED) -> GroupRecord:
    """A group that is being stopped for a reason, with another task that failed for the reason ``failed``."""
    other = TaskRecord(name="other", state=State.FAILED, reason=failed)
    return GroupRecord(name="g", tasks=(other,), state=State.STOPPING, stop_reason=reason)


@pytest.mark.parametrize(
    ("group", "end", "expected"),
    [
        (RUNNING, End(ended_at=1, exit_code=0), (State.COMPLETED, None)),
        (RUNNING, End(ended_at=1, exit_code=3), (State.FAILED, Reason.EXIT_CODE)),
        (RUNNING, End(ended_at=1, signal=9), (State.FAILED, Reason.SIGNAL)),
        (RUNNING, End(ended_at=1, signal=9, oom_pid=7), (State.FAILED, Reason.OOM_KILLED)),
        # torchrun exits normally, with an error code, if the kernel killed one of its ranks.
        (RUNNING, End(ended_at=1, exit_code=1, oom_pid=7), (State.FAILED, Reason.OOM_KILLED)),
        (RUNNING, End(ended_at=1, reason=EndReason.KEEPER_DIED, oom_pid=7), (State.FAILED, Reason.OOM_KILLED)),
        (RUNNING, End(ended_at=1, exit_code=0, oom_pid=7), (State.COMPLETED, None)),
        (RUNNING, End(ended_at=1, reason=EndReason.START_ERROR, exit_code=127), (State.FAILED, Reason.START_ERROR)),
        (RUNNING, End(ended_at=1, reason=EndReason.RUNNER_DIED, signal=9), (State.FAILED, Reason.INTERNAL)),
        (RUNNING, End(ended_at=1, reason=EndReason.KEEPER_DIED, exit_code=0), (State.COMPLETED, None)),
        (RUNNING, End(ended_at=1, reason=EndReason.REBOOTED), (State.FAILED, Reason.NODE_LOST)),
        (RUNNING, End(ended_at=1, reason=STOPPED, signal=15), (State.FAILED, Reason.INTERNAL)),
        (_stopping(Reason.CANCELED), End(ended_at=1, reason=STOPPED, signal=15), (State.CANCELED, Reason.CANCELED)),
        (
            _stopping(Reason.PEER_FAILED),
            End(ended_at=1, reason=STOPPED, signal=15),
            (State.FAILED, Reason.PEER_FAILED),
        ),
        (
            _stopping(Reason.EXEC_TIMEOUT),
            End(ended_at=1, reason=STOPPED, signal=15),
            (State.FAILED, Reason.EXEC_TIMEOUT),
        ),
        (_stopping(None), End(ended_at=1, reason=STOPPED, signal=15), (State.COMPLETED, None)),
        # The task failed by itself just before it was stopped.
        (_stopping(Reason.PEER_FAILED), End(ended_at=1, exit_code=1), (State.FAILED, Reason.EXIT_CODE)),
        # Another task was stopped because of this one, before the engine reported the end of the allocation.
        (_stopping(Reason.PEER_FAILED), TIME_LIMIT, (State.FAILED, Reason.EXEC_TIMEOUT)),
        (_stopping(Reason.PEER_FAILED, Reason.EXIT_CODE), TIME_LIMIT, (State.FAILED, Reason.PEER_FAILED)),
        (_stopping(Reason.CANCELED), TIME_LIMIT, (State.CANCELED, Reason.CANCELED)),
    ],
)
def test_end_determines_state_and_reason(group: GroupRecord, end: End, expected: tuple[State, Reason | None]) -> None:
    task = conclude(TaskRecord(name="t", state=State.RUNNING), group, end)
    assert (task.state, task.reason) == expected


@pytest.mark.parametrize("why", [EndReason.STOPPED, EndReason.PEER_FAILED])
@pytest.mark.parametrize(
    ("error", "reason"),
    [
        ({"message": "ValueError: bad label", "raised_at": 69.9}, Reason.EXIT_CODE),
        ({"message": {"message": "ValueError: bad label", "extraInfo": {"timestamp": "69"}}}, Reason.EXIT_CODE),
        # The exception may be a consequence of the signal, or of the loss of a peer.
        ({"message": "ValueError: bad label", "raised_at": 70.1}, Reason.PEER_FAILED),
        ({"message": {"message": "ValueError: bad label", "extraInfo": {"timestamp": "70"}}}, Reason.PEER_FAILED),
        ({"message": "ValueError: bad label", "raised_at": True}, Reason.PEER_FAILED),
        ({"message": "RuntimeError: Connection closed by peer", "raised_at": 69.0}, Reason.PEER_FAILED),
        (None, Reason.PEER_FAILED),
    ],
)
def test_a_task_that_was_already_failing_when_it_was_stopped_failed_by_itself(
    why: EndReason, error: dict[str, object] | None, reason: Reason
) -> None:
    clock = Clock(offset_s=-30.0, uncertainty_s=0.01)
    end = End(ended_at=101.0, reason=why, exit_code=1, stopped_at=100.0, error=error, clock=clock)
    task = conclude(TaskRecord(name="t", state=State.RUNNING), _stopping(Reason.PEER_FAILED), end)
    assert task.reason is reason


def test_message_names_the_usual_cause_if_runner_and_keeper_died() -> None:
    task = conclude(TaskRecord(name="t", state=State.RUNNING), RUNNING, End(ended_at=1, reason=EndReason.BOTH_DIED))
    assert "KillUserProcesses=no" in task.message


def test_lost_output_is_in_the_message() -> None:
    task = conclude(TaskRecord(name="t", state=State.RUNNING), RUNNING, End(ended_at=1, exit_code=0, lost_output_bytes=12))
    assert "12 B of output lost" in task.message


def test_unknown_fields_in_the_end_from_a_node_are_ignored() -> None:
    assert end_from({"exit_code": 4, "mood": "bad"}, 7.0) == End(ended_at=7.0, exit_code=4)


KERNEL = (
    "oom-kill:constraint=CONSTRAINT_MEMCG,oom_memcg=/job,task=python3,pid=17412,uid=0",
    "Killed process 17412 (python3) total-vm:323784kB, anon-rss:60800kB",
)


def test_kernel_messages_are_in_the_message_and_the_cause() -> None:
    end = end_from({"ended_at": 1.0, "signal": 9, "kernel": {"oom_pid": 17412, "lines": list(KERNEL)}}, 1.0)
    task = conclude(TaskRecord(name="t", state=State.RUNNING, pid=5), RUNNING, end)
    assert task.message == "out of memory: the kernel killed process 17412 (python3), which held 59 MiB"
    cause = first_cause([task], {})
    assert cause is not None
    assert (cause.reason, cause.pid, cause.kernel) == (Reason.OOM_KILLED, 17412, KERNEL)


def test_gpu_errors_of_the_kernel_do_not_change_the_reason() -> None:
    xid = "NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus."
    end = end_from({"ended_at": 1.0, "exit_code": 1, "kernel": {"oom_pid": None, "lines": [xid]}}, 1.0)
    cause = first_cause([conclude(TaskRecord(name="t", state=State.RUNNING, pid=5), RUNNING, end)], {})
    assert cause is not None
    assert (cause.reason, cause.pid, cause.kernel) == (Reason.EXIT_CODE, 5, (xid,))


CLOCK_BEHIND = Clock(offset_s=-30.0, uncertainty_s=0.01)


def test_times_of_a_node_are_converted_to_the_supervisors_clock() -> None:
    end = end_from({"started_at": 60.0, "stopped_at": 69.0, "ended_at": 70.0}, 101.0, CLOCK_BEHIND)
    assert (end.started_at, end.stopped_at, end.ended_at, end.clock) == (90.0, 99.0, 100.0, CLOCK_BEHIND)


@pytest.mark.parametrize("clock", [None, CLOCK_BEHIND])
def test_end_is_never_later_than_its_observation(clock: Clock | None) -> None:
    assert end_from({"ended_at": 5000.0}, 101.0, clock).ended_at == 101.0


def test_an_end_that_an_older_distflow_stored_has_no_clock() -> None:
    stored = b'{"name":"t","state":"FAILED","ended_at":7.0,"end":{"ended_at":7.0,"exit_code":1}}'
    assert decode(stored, TaskRecord).end == End(ended_at=7.0, exit_code=1)


def _failed(name: str, at: float, message: str = "", reason: Reason = Reason.EXIT_CODE, **error: object) -> TaskRecord:
    body = {"message": {"message": message}} | error if message else None
    end = End(ended_at=at, exit_code=1, error=body)
    return TaskRecord(name=name, state=State.FAILED, reason=reason, ended_at=at, end=end, message="exit code 1", ranks="0-7")


def test_the_earliest_failure_is_the_cause() -> None:
    cause = first_cause([_failed("b", 2.0), _failed("a", 1.0)], {})
    assert cause is not None
    assert cause.task == "a"


def test_the_last_lines_are_those_of_the_failed_rank() -> None:
    raised = ["Traceback (most recent call last):", '  File "a.py", line 1, in <module>', "ValueError: bad batch"]
    lost = [*raised[:2], "RuntimeError: Connection closed by peer"]
    own, other = [PrintedLine.of(text, 3) for text in ["epoch 1", *raised]], [PrintedLine.of(text, 2) for text in lost]
    cause = first_cause([replace(_failed("t", 1.0), ranks="2-3")], {"t": (*own, *other)})
    assert cause is not None
    assert (cause.ranks, cause.lines) == ("3", ("epoch 1", *raised))
    cause = first_cause([_failed("t", 1.0)], {"t": ("epoch 1", *raised)})
    assert cause is not None
    assert cause.lines == ("epoch 1", *raised)


def _failed_at(name: str, at: float, uncertainty_s: float | None, node: str = "") -> TaskRecord:
    clock = None if uncertainty_s is None else Clock(offset_s=0.0, uncertainty_s=uncertainty_s)
    task = _failed(name, at)
    assert task.end is not None
    return replace(task, node=node or f"node of {name}", end=replace(task.end, clock=clock))


@pytest.mark.parametrize(
    ("tasks", "cause", "rivals"),
    [
        # The difference is larger than the uncertainty of both clocks.
        ([_failed_at("a", 2.0, 0.4), _failed_at("b", 1.0, 0.4)], "b", ()),
        # The difference is smaller, so the spec's order decides.
        ([_failed_at("a", 2.0, 0.6), _failed_at("b", 1.0, 0.6)], "a", ("b",)),
        ([_failed_at("a", 1.0, 0.6), _failed_at("b", 2.0, 0.6)], "a", ("b",)),
        # Of three tasks, only one certainly failed later.
        ([_failed_at("a", 9.0, 0.1), _failed_at("b", 1.1, 0.1), _failed_at("c", 1.0, 0.1)], "b", ("c",)),
        # Tasks on one node have the same clock, so its uncertainty does not matter.
        ([_failed_at("a", 1.1, 9.0, "n"), _failed_at("b", 1.0, 9.0, "n")], "b", ()),
        # In a record of an older distflow, the clocks are unknown, so only the times count.
        ([_failed_at("a", 1.1, None), _failed_at("b", 1.0, None)], "b", ()),
        ([_failed_at("a", 1.0, None), _failed_at("b", 1.0, None)], "a", ("b",)),
    ],
)
def test_order_of_the_spec_decides_within_the_uncertainty_of_clocks(
    tasks: list[TaskRecord], cause: str, rivals: tuple[str, ...]
) -> None:
    found = first_cause(tasks, {})
    assert found is not None
    assert (found.task, found.rivals) == (cause, rivals)


def test_task_that_lost_its_peer_is_not_a_rival() -> None:
    found = first_cause([_failed_at("a", 1.0, 0.5), _failed_at("b", 1.1, 0.5)], {"a": ("Broken pipe",)})
    assert found is not None
    assert (found.task, found.rivals) == ("b", ())


def test_task_that_lost_its_peer_is_not_the_cause_even_if_it_ended_first() -> None:
    bystander = _failed("a", 1.0, "RuntimeError: [...] Connection closed by peer [127.0.0.1]:4242")
    culprit = _failed("b", 1.2, "ValueError: bad label", rank=9)
    cause = first_cause([bystander, culprit], {})
    assert cause is not None
    assert (cause.task, cause.ranks) == ("b", "9")
    assert "bad label" in cause.message


def test_output_also_shows_that_a_task_lost_its_peer() -> None:
    lines = {"a": ("Traceback …", "RuntimeError: Connection reset by peer")}
    cause = first_cause([_failed("a", 1.0), _failed("b", 2.0)], lines)
    assert cause is not None
    assert cause.task == "b"


def test_task_that_was_stopped_because_its_peer_failed_is_not_the_cause() -> None:
    assert first_cause([_failed("a", 1.0, reason=Reason.PEER_FAILED)], {}) is None


@pytest.mark.parametrize(
    ("printed_at", "text", "master", "cause"),
    [
        (
            49.0,
            "ValueError: bad label",
            "Connection closed by peer",
            ("worker", "3", "failed before it was stopped: ValueError: bad label"),
        ),
        (51.0, "ValueError: bad label", "Connection closed by peer", None),  # after the stop, which may be the reason
        (49.0, "RuntimeError: Broken pipe", "Connection closed by peer", None),
        (49.0, "ValueError: bad label", "KeyError: 'x'", None),
    ],
)
def test_a_stopped_task_is_the_cause_only_if_its_rank_failed_before_and_the_others_lost_it(
    printed_at: float, text: str, master: str, cause: tuple[str, str, str] | None
) -> None:
    raised = ("[rank3]: Traceback (most recent call last):", '[rank3]:   File "a.py", line 1, in <module>', f"[rank3]: {text}")
    lines: dict[str, tuple[str, ...]] = {"worker": tuple(PrintedLine.of(line, time=printed_at) for line in raised)}
    # The node's clock is 100 s ahead, and the task was stopped at 50 s by that clock.
    end = End(
        ended_at=3.0, reason=EndReason.PEER_FAILED, signal=9, stopped_at=-50.0, clock=Clock(offset_s=100.0, uncertainty_s=0.1)
    )
    worker = replace(_failed("worker", 3.0, reason=Reason.PEER_FAILED), end=end)
    group = with_own_failures(replace(RUNNING, tasks=(_failed("master", 1.0, master), worker)), lambda _: True, lines)
    found = first_cause(group.tasks, lines)
    assert found is not None
    assert (found.task, found.ranks, found.message) == (cause or ("master", "0-7", f"exit code 1: {master}"))


def test_failed_task_is_the_cause_even_if_a_node_was_lost_earlier() -> None:
    cause = first_cause([_failed("a", 1.0, reason=Reason.NODE_LOST), _failed("b", 9.0)], {})
    assert cause is not None
    assert cause.task == "b"


WORKER = ("u1", "train", "t1")
STACK = ("Traceback (most recent call last):", '  File "/data/train.py", line 3, in <module>', "ValueError: no address")
LABELED = tuple(f"[rank9]: {line}" for line in STACK)
MESSAGE = "t1 ended with exit code 0 although its ranks failed (ValueError: no address); t0 waits for ranks 8-15"


def gang(lines: tuple[str, ...] = STACK, *, after_s: float = 5.0, **plan: bool) -> Driver:
    """A gang whose second task has ended with code 0, and whose first task continues."""
    driver = Driver(
        workflow(group_plan(**plan)),  # type: ignore[arg-type]
        behavior=lambda key: Behavior(seconds=after_s if key.task == "t1" else float("inf")),
    )
    driver.output("t1", lines)
    driver.settle()
    driver.advance(after_s)
    assert driver.group().task("t1").state is State.COMPLETED
    return driver


def test_hidden_failure_is_reported_at_once_and_the_group_is_stopped_if_other_tasks_stay_silent() -> None:
    driver = gang()
    assert (driver.group().state, driver.group().message) == (State.RUNNING, MESSAGE)
    driver.advance(MISSING_RANKS_S - 0.5)
    assert driver.group().state is State.RUNNING
    driver.advance(0.5)
    driver.run()
    group, cause = driver.group(), driver.cause()
    assert (group.state, group.reason, group.task("t0").reason) == (State.FAILED, Reason.EXIT_CODE, Reason.PEER_FAILED)
    assert (cause.task, cause.ranks, cause.exit_code, cause.node) == ("t1", "8-15", 0, group.task("t1").node)
    assert cause.message == "ended with exit code 0 although its ranks failed (ValueError: no address)"
    assert cause.traceback.splitlines() == list(STACK)
    assert [event.text for event in driver.events].count(f"train: {MESSAGE}") == 1


def test_the_diagnosis_names_the_exception_and_the_hidden_exit_code() -> None:
    driver = gang()
    for _ in range(2):  # while the group runs, and after its end
        findings = diagnose(group_outcome_of(driver.group(), 0, {"t1": STACK}, driver.events))
        assert [one.key for one in findings] == ["exception", "exit-code-hidden"]
        assert "t1 on n2" in findings[0].found
        assert "although its ranks failed (ValueError: no address)" in findings[1].found
        driver.run()


def test_tasks_that_make_progress_are_not_stopped() -> None:
    driver = gang()
    for _ in range(4):
        driver.beat("t0")
        driver.advance(MISSING_RANKS_S - 1)
    assert (driver.group().state, driver.group().message) == (State.RUNNING, MESSAGE)
    driver.advance(MISSING_RANKS_S)
    assert driver.group().state is not State.RUNNING


def test_recent_heartbeat_prevents_the_stop_even_if_the_hidden_failure_is_found_late() -> None:
    driver = gang(())
    task = driver.group().task("t1")
    # The next supervisor reads the output and the heartbeat only now.
    driver.advance(300)
    driver.output("t1", STACK)
    driver.beat("t0", driver.clock.now() - 1)
    unchecked = driver.record().with_group(driver.group().with_task(replace(task, is_output_checked=False)))
    driver.rewrite(unchecked)
    driver.settle()
    assert driver.group().state is State.RUNNING
    assert driver.group().message == MESSAGE


@pytest.mark.parametrize(("lines", "after_s"), [(LABELED, 5.0), (STACK, 600.0)])
def test_hidden_failure_of_ranks_that_may_have_joined_is_only_reported(lines: tuple[str, ...], after_s: float) -> None:
    driver = gang(lines, after_s=after_s)
    assert driver.group().message == MESSAGE
    driver.advance(3600)
    assert driver.group().state is State.RUNNING


def test_group_is_stopped_if_ranks_fail_while_they_join_even_after_a_long_time() -> None:
    joining = (STACK[0], '  File "/data/train.py", line 3, in <module>', "    dist.init_process_group()", STACK[-1])
    driver = gang(joining, after_s=600.0)
    driver.advance(MISSING_RANKS_S)
    assert driver.group().state is not State.RUNNING


def test_stop_on_missing_ranks_overrides_the_default() -> None:
    driver = gang(stop_on_missing_ranks=False)
    driver.advance(3600)
    assert (driver.group().state, driver.group().message) == (State.RUNNING, MESSAGE)
    driver = gang(LABELED, stop_on_missing_ranks=True)
    driver.advance(MISSING_RANKS_S)
    assert driver.group().state is not State.RUNNING


@pytest.mark.parametrize("lines", [(), ("done",), (*STACK, *["step"] * 30)])
def test_task_without_a_failure_in_its_output_does_not_stop_the_group(lines: tuple[str, ...]) -> None:
    driver = gang(lines)
    driver.advance(3600)
    assert (driver.group().state, driver.group().message) == (State.RUNNING, "")


def test_ignored_tasks_and_groups_without_a_world_are_not_checked() -> None:
    for driver in (gang(ignore=True), gang(world=False, ignore=False)):
        driver.advance(3600)
        assert (driver.group().state, driver.group().message) == (State.RUNNING, "")


def test_group_completes_despite_a_hidden_failure_if_its_other_tasks_complete() -> None:
    driver = Driver(workflow(group_plan()), behavior=lambda key: Behavior(seconds=5 if key.task == "t1" else 20))
    driver.output("t1", STACK)
    driver.run()
    assert (driver.group().state, driver.group().cause, driver.group().message) == (State.COMPLETED, None, "")


def test_hidden_failure_is_the_cause_even_if_the_others_end_first() -> None:
    driver = Driver(
        workflow(group_plan()),
        behavior=lambda key: Behavior(seconds=5) if key.task == "t1" else Behavior(seconds=20, exit_code=1),
    )
    driver.output("t1", STACK)
    driver.output("t0", ("torch.distributed.DistStoreError: Timed out after 16 seconds waiting for clients.",))
    driver.run()
    assert driver.cause().task == "t1"
