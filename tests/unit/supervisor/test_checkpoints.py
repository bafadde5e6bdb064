"""Checkpoints: when they are due, how long an ended group waits for them, and which of them the next attempt gets."""

from __future__ import annotations

from typing import Any

import pytest

from distflow.backends.base import AttemptKey, CheckpointRef, Collected, CollectUnanswered
from distflow.lifecycle.exits import ExitActions
from distflow.lifecycle.states import Reason, State, WorkflowState
from distflow.plan.model import BoundLaunch, GroupPlan, PlannedCheckpoint, PlannedFile
from distflow.spec.model import Retry
from distflow.state.record import DataKind, DataRef, TransferRecord
from distflow.structs import replace
from distflow.supervisor.checkpoints import add_checkpoints, apply_checkpoint, transfer_of
from distflow.supervisor.commands import CommandId, PackCheckpoint, TransferData, TransferEnded
from distflow.testing.backend import Behavior
from unit.supervisor.gangs import Driver, group_plan, node, pool, workflow

CHECKPOINT = PlannedCheckpoint(place="files/tmp/models", shown="/tmp/models", url="file:///kept/{{workflow_id}}", every_s=60.0)
SCRIPT = PlannedFile(path="work/train.sh", shown="train.sh", text="x")
STORE_DATA = DataRef(DataKind.STORE, 0)
PACK = CommandId(PackCheckpoint, "u1", "train", "t0", 0, 0)
STORE = CommandId(TransferData, "u1", "train", "t0", 0, STORE_DATA)


def plan(**more: object) -> GroupPlan:
    """A group whose first task has a checkpoint."""
    made = group_plan(**more)  # type: ignore[arg-type]
    first = replace(made.launches[0], checkpoints=(CHECKPOINT,))
    return replace(made, launches=(first, *made.launches[1:]))


def running_gang(seconds: float = 1000.0, exit_code: int = 0, **more: object) -> Driver:
    """A running gang with a checkpoint. The exit code is that of the first attempt."""

    def behave(key: AttemptKey) -> Behavior:
        return Behavior(seconds=seconds, exit_code=exit_code if key.attempt == 0 else 0)

    driver = Driver(workflow(plan(**more)), behavior=behave, on=pool(node("n1"), node("n2"), node_lost_after_s=30.0))
    driver.settle()
    return driver


def end_store(driver: Driver, attempt: int = 0, error: str = "") -> None:
    """Report the end of the transfer that writes the checkpoint."""
    key = AttemptKey(workflow="u1", group="train", task="t0", attempt=attempt, node="")
    now = driver.clock.now()
    outcome = TransferRecord(
        data=DataRef(DataKind.STORE, 0), task="t0", at=now, url="file:///kept", files=1, content=1, error=error
    )
    ended = TransferEnded(at=now, key=key, data=DataRef(DataKind.STORE, 0), url="file:///kept", outcome=outcome)
    driver.observations.append(ended)
    driver.observe()


def test_checkpoint_is_due_one_interval_after_the_previous_one_is_written() -> None:
    driver = running_gang()
    driver.advance(59.0)
    assert driver.backend.collected == []
    driver.advance(1.5)
    assert driver.backend.collected == ["u1/train/t0/0/files/tmp/models"]
    assert STORE in driver.supervisor.in_flight
    driver.advance(100.0)
    assert len(driver.backend.collected) == 1  # the previous one is not written yet
    end_store(driver)
    driver.advance(59.0)
    assert len(driver.backend.collected) == 1
    driver.advance(2.0)
    assert len(driver.backend.collected) == 2
    assert driver.group().message == ""


def test_checkpoint_is_taken_again_after_its_transfer_broke_off() -> None:
    driver = running_gang()
    driver.backend.holds_outputs = True
    driver.advance(60.5)
    command = driver.supervisor.in_flight[PACK]
    driver.backend.holds_outputs = False
    driver.observations.append(CollectUnanswered(at=driver.clock.now(), key=command.key, checkpoint=CheckpointRef(0)))
    driver.settle()
    assert len(driver.backend.collected) == 1
    assert STORE in driver.supervisor.in_flight


def test_ended_group_waits_for_its_last_checkpoint() -> None:
    driver = running_gang(seconds=5)
    driver.advance(6.0)
    assert driver.group().state is State.RUNNING
    assert driver.group().message == "all tasks have ended; saving the last checkpoint of t0"
    assert STORE in driver.supervisor.in_flight
    end_store(driver)
    driver.settle()
    assert driver.record().state is WorkflowState.COMPLETED
    taken = driver.group().checkpoint("t0", 0)
    assert taken is not None
    assert (taken.is_last, taken.is_new) == (True, False)


def test_checkpoint_that_began_before_the_end_of_the_task_is_not_the_last_one() -> None:
    driver = running_gang(seconds=62)
    driver.advance(1.0)
    driver.backend.holds_outputs = True
    driver.advance(60.0)
    assert PACK in driver.supervisor.in_flight
    driver.advance(5.0)
    key = AttemptKey(workflow="u1", group="train", task="t0", attempt=0, node="n1")
    assert [type(command) for command in driver.supervisor.in_flight.values()] == [PackCheckpoint]
    driver.observations.append(
        Collected(at=driver.clock.now(), key=key, checkpoint=CheckpointRef(0), digest="0" * 64, size=10240)
    )
    driver.settle()
    driver.backend.holds_outputs = False
    end_store(driver)
    driver.settle()
    assert len(driver.backend.collected) == 1
    assert not driver.record().state.is_final
    end_store(driver)
    driver.settle()
    assert driver.record().state is WorkflowState.COMPLETED


def test_failed_write_of_a_checkpoint_is_only_reported() -> None:
    driver = running_gang(seconds=5)
    driver.advance(6.0)
    end_store(driver, error="no such bucket")
    driver.settle()
    assert driver.record().state is WorkflowState.COMPLETED
    assert "t0: its checkpoint was not written: no such bucket" in [event.text for event in driver.events]


def test_checkpoint_is_written_again_after_a_failure_even_if_it_is_unchanged() -> None:
    driver = running_gang()
    driver.advance(60.5)
    key = driver.supervisor.in_flight[STORE].key
    end_store(driver, error="the bucket is unreachable")
    known = driver.group().checkpoint("t0", 0)
    assert known is not None
    same = Collected(
        at=driver.clock.now(), key=replace(key, node="n1"), checkpoint=CheckpointRef(0), digest=known.digest, size=known.size
    )
    driver.observations.append(same)
    driver.settle()
    assert STORE in driver.supervisor.in_flight
    end_store(driver)
    driver.observations.append(same)
    driver.settle()
    assert STORE not in driver.supervisor.in_flight  # the checkpoint is at its URL, and has not changed


def test_checkpoint_that_arrives_during_a_write_does_not_replace_the_one_being_written() -> None:
    driver = running_gang()
    driver.advance(60.5)
    key = replace(driver.supervisor.in_flight[STORE].key, node="n1")
    written = driver.group().checkpoint("t0", 0)
    assert written is not None
    driver.observations.append(
        Collected(at=driver.clock.now(), key=key, checkpoint=CheckpointRef(0), digest="1" * 64, size=10240)
    )
    driver.settle()
    end_store(driver)
    known = driver.group().checkpoint("t0", 0)
    assert known is not None
    assert (known.digest, known.is_new) == (written.digest, False)


def test_checkpoint_of_a_lost_node_does_not_replace_a_later_one() -> None:
    """The transfer of the earlier attempt stalled, and continued after the network was repaired."""
    driver = running_gang(exit_actions=ExitActions(reschedule=((3001, 3001),)), retry=Retry(backoff_s=1), tasks=1)
    driver.advance(1.0)
    driver.backend.cut("n1")
    for _ in range(4):
        driver.advance(32.0)
    later = driver.group().checkpoint("t0", 0)
    assert later is not None
    assert (driver.group().attempt, later.attempt) == (1, 1)
    end_store(driver, attempt=1)
    driver.backend.holds_outputs = True
    key = AttemptKey(workflow="u1", group="train", task="t0", attempt=0, node="n1")
    driver.observations.append(
        Collected(at=driver.clock.now(), key=key, checkpoint=CheckpointRef(0), digest="1" * 64, size=10240)
    )
    driver.settle()
    known = driver.group().checkpoint("t0", 0)
    assert known is not None
    assert (known.attempt, known.digest) == (1, later.digest)


@pytest.mark.parametrize("state", [State.SCHEDULING, State.INITIALIZING])
def test_checkpoint_of_a_lost_node_replaces_another_only_before_that_one_is_sent(state: State) -> None:
    driver = running_gang(exit_actions=ExitActions(reschedule=((3001, 3001),)), retry=Retry(backoff_s=1), tasks=1)
    driver.advance(60.5)
    end_store(driver)
    driver.backend.cut("n1")
    driver.advance(32.0)
    driver.advance(2.0)
    group = replace(driver.group(), state=state)
    given = group.checkpoint("t0", 0)
    assert given is not None
    assert (group.attempt, given.attempt) == (1, 0)
    key = AttemptKey(workflow="u1", group="train", task="t0", attempt=0, node="n1")
    late = Collected(at=driver.clock.now(), key=key, checkpoint=CheckpointRef(0), digest="1" * 64, size=10240)
    after, _ = apply_checkpoint(driver.record(), plan(), group, group.earlier[0], CheckpointRef(0), late)
    known = after.checkpoint("t0", 0)
    assert known is not None
    assert known.digest == (given.digest if state is State.INITIALIZING else late.digest)


SHARED = PlannedCheckpoint(place="work", shown=".", url="", every_s=60.0)
RETRY_ONCE: dict[str, Any] = {"exit_actions": ExitActions(reschedule=((75, 75),)), "retry": Retry(backoff_s=1, limit=1)}


def sharing_gang(seconds: float = 100.0, exit_code: int = 75, **more: object) -> Driver:
    """A gang whose tasks share a directory, and whose lead ends with an exit code."""
    made = plan(**more)
    made = replace(made, launches=tuple(replace(one, checkpoints=(SHARED,)) for one in made.launches))

    def behave(key: AttemptKey) -> Behavior:
        return Behavior(seconds=seconds, exit_code=exit_code if key.task == "t0" else 0)

    driver = Driver(workflow(made), behavior=behave, on=pool(node("n1"), node("n2"), node_lost_after_s=30.0))
    driver.settle()
    return driver


def test_all_tasks_of_the_next_attempt_get_the_shared_files_of_all_tasks_with_the_leads_last() -> None:
    driver = sharing_gang(**RETRY_ONCE)
    driver.advance(60.5)
    assert driver.backend.collected == ["u1/train/t0/0/work", "u1/train/t1/0/work"], "while the tasks run"
    driver.advance(40.0)
    driver.settle()
    assert driver.backend.collected[2:] == ["u1/train/t0/0/work", "u1/train/t1/0/work"], "at the end of the tasks"
    assert not any(one.kind is TransferData for one in driver.supervisor.in_flight)
    driver.advance(2.0)
    driver.advance(2.0)
    group, whole = driver.group(), driver.workflows["u1"].plan.group("train")
    assert group.attempt == 1
    taken = {task: group.checkpoint(task, 0) for task in ("t0", "t1")}
    for task in taken:
        launch = BoundLaunch(task=task, node="n1", argv=("x",), environment={}, files=(SCRIPT,))
        placed = add_checkpoints(launch, whole, group).files
        assert [(one.path, one.within, one.blob) for one in placed[:2]] == [
            (".", "work", one.digest) for name in ("t1", "t0") if (one := taken[name]) is not None
        ]
        assert placed[2] is SCRIPT, "files of the spec are placed over older ones of the same name"
    # A third attempt does not follow, so nothing more is copied.
    driver.advance(200.0)
    driver.settle()
    assert driver.group().state is State.FAILED
    assert len(driver.backend.collected) == 4


def test_shared_files_are_not_copied_after_success_or_cancellation() -> None:
    driver = sharing_gang(seconds=5, exit_code=0, **RETRY_ONCE)
    driver.advance(6.0)
    assert driver.group().state is State.COMPLETED
    assert driver.backend.collected == []
    canceled = sharing_gang(**RETRY_ONCE)
    canceled.advance(1.0)
    canceled.cancel()
    canceled.settle()
    canceled.advance(31.0)
    assert canceled.group().state is State.CANCELED
    assert canceled.backend.collected == []


def test_event_reports_ranks_that_begin_with_different_files() -> None:
    driver = running_gang(seconds=5, exit_code=75, **RETRY_ONCE)
    driver.advance(6.0)
    end_store(driver)
    driver.settle()
    assert driver.group().attempt == 1
    (message,) = [event.text for event in driver.events if "different files" in event.text]
    assert message == (
        "train: the tasks begin with different files in `/tmp/models` (t0: 10 KiB, t1: none). Ranks that load different "
        "checkpoints train wrongly; `shared` gives all tasks of the group the same files"
    )
    # Different parts of a shared directory cause no warning.
    shared = sharing_gang(**RETRY_ONCE)
    shared.advance(101.0)
    shared.settle()
    assert shared.group().attempt == 1
    assert not [event for event in shared.events if "different files" in event.text]


def test_ended_group_waits_for_the_checkpoint_of_an_unreachable_node_until_the_node_is_lost() -> None:
    driver = running_gang(seconds=5)
    driver.backend.holds_outputs = True
    driver.advance(6.0)
    driver.backend.cut("n1")
    driver.advance(29.0)
    assert not driver.record().state.is_final
    driver.advance(2.0)
    assert driver.record().state is WorkflowState.COMPLETED


def test_rebooted_node_sends_the_last_checkpoint_when_it_is_reachable_again() -> None:
    driver = running_gang(exit_actions=ExitActions(reschedule=((3001, 3001),)), retry=Retry(backoff_s=1), tasks=1)
    driver.advance(30.0)
    driver.backend.reboot("n1")
    driver.advance(10.0)
    driver.backend.heal("n1")
    driver.settle()
    assert driver.group().task("t0").reason is Reason.NODE_LOST
    assert driver.backend.collected == ["u1/train/t0/0/files/tmp/models"]
    end_store(driver)
    driver.advance(2.0)
    driver.advance(2.0)
    taken = driver.group().checkpoint("t0", 0)
    assert taken is not None
    assert (driver.group().attempt, taken.is_last, taken.attempt) == (1, True, 0)


def test_reason_of_a_stopped_group_is_kept_while_the_last_checkpoint_is_saved() -> None:
    driver = running_gang(exec_s=10.0)
    driver.advance(11.0)
    assert STORE in driver.supervisor.in_flight
    end_store(driver)
    driver.settle()
    group = driver.group()
    assert (group.status, group.message) == ("FAILED_EXEC_TIMEOUT", "ran longer than 10 s (exec_timeout)")


def test_cancel_waits_a_limited_time_for_the_last_checkpoint() -> None:
    driver = running_gang()
    driver.advance(1.0)
    driver.cancel()
    driver.settle()
    assert STORE in driver.supervisor.in_flight
    assert driver.group().state is State.STOPPING
    driver.advance(61.0)
    assert (driver.group().state, driver.group().message) == (State.CANCELED, "canceled by me")


def test_cancel_saves_checkpoints_of_the_whole_grace_period() -> None:
    driver = Driver(workflow(plan()), behavior=lambda _: Behavior(seconds=1000.0, obeys_term=False), on=pool(stop_grace_s=90.0))
    driver.settle()
    driver.cancel()
    driver.settle()
    driver.advance(90.0)
    assert driver.backend.collected == ["u1/train/t0/0/files/tmp/models"]
    assert STORE in driver.supervisor.in_flight
    driver.advance(59.0)
    assert driver.group().state is State.STOPPING
    driver.advance(2.0)
    assert driver.group().state is State.CANCELED


def test_next_attempt_gets_the_last_checkpoint() -> None:
    driver = running_gang(seconds=5, exit_code=3, exit_actions=ExitActions(reschedule=((3, 3),)), retry=Retry(backoff_s=1))
    driver.advance(6.0)
    assert driver.group().attempt == 0
    end_store(driver)
    driver.settle()
    driver.advance(2.0)
    group = driver.group()
    assert (group.attempt, group.state) == (1, State.RUNNING)
    taken = group.checkpoint("t0", 0)
    assert taken is not None
    launch = add_checkpoints(
        BoundLaunch(task="t0", node="n1", argv=("x",), environment={}), driver.workflows["u1"].plan.groups[0], group
    )
    (file,) = launch.files
    assert (file.path, file.blob, file.is_tar) == ("files/tmp", taken.digest, True)


def test_checkpoint_is_written_to_the_url_of_the_spec() -> None:
    driver = running_gang()
    driver.advance(60.5)
    one = driver.workflows["u1"]
    command = driver.supervisor.in_flight[STORE]
    assert isinstance(command, TransferData)
    transfer = transfer_of(one.plan, one.record, command)
    taken = driver.group().checkpoint("t0", 0)
    assert taken is not None
    assert (transfer.url, transfer.digest) == ("file:///kept/w-1", taken.digest)
    assert PACK not in driver.supervisor.in_flight
