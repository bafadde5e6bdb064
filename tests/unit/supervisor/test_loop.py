"""The loop, on a store and a clock that is turned by hand: what is kept of archives, and for how long."""

from __future__ import annotations

import pytest

from distflow.backends.base import AttemptKey, CheckpointRef, Collected
from distflow.errors import StateError
from distflow.lifecycle.states import Reason, State
from distflow.spec.model import DataSpec, InputSpec, Retry
from distflow.state.event_details import CancelRequested
from distflow.state.record import CancelRequest, DataKind, DataRef, Event, OrphanState, TransferResult
from distflow.storage.credentials import Identity
from distflow.structs import replace
from distflow.supervisor.checkpoints import CANCELED_S
from distflow.supervisor.commands import TransferEnded
from distflow.supervisor.transfers import archives
from distflow.testing.backend import Behavior
from unit.supervisor.gangs import Driver, group_plan, node, pool, workflow
from unit.supervisor.test_checkpoints import plan, stored

DIGEST = "0" * 64


def behave(key: AttemptKey) -> Behavior:
    return Behavior(seconds=5.0 if key.group == "top" else float("inf"))


def unreadable(url: str) -> Identity | None:
    raise StateError("the credential bucket cannot be read")


@pytest.fixture
def driver() -> Driver:
    return Driver(on=pool(node("n1")), behavior=behave)


def end_at_once(driver: Driver) -> None:
    """End ``u1`` by force."""
    driver.cancel(force=True)
    driver.settle()
    assert driver.record().state.is_final


def test_an_archive_that_comes_when_nobody_takes_it_any_more_is_removed(driver: Driver) -> None:
    driver.add(workflow(plan(tasks=1)))
    driver.add(workflow(group_plan(tasks=1, gpus=0), uuid="u2"))
    driver.settle()
    driver.backend.holds_outputs = True
    driver.advance(61.0)
    end_at_once(driver)
    (driver.directory.blobs / DIGEST).touch()
    key = AttemptKey(workflow="u1", group="train", task="t0", attempt=0, node="n1")
    driver.seen.append(Collected(at=driver.clock.now(), key=key, checkpoint=CheckpointRef(0), digest=DIGEST, size=10240))
    driver.settle()
    assert list(driver.directory.blobs.iterdir()) == []


def test_an_input_that_comes_when_nobody_takes_it_any_more_is_removed(driver: Driver) -> None:
    """Its transfer had just ended when the cancel came."""
    driver.add(workflow(group_plan(tasks=1)))
    driver.add(workflow(group_plan(tasks=1, gpus=0), uuid="u2"))
    driver.settle()
    end_at_once(driver)
    (driver.directory.blobs / DIGEST).touch()
    key = AttemptKey(workflow="u1", group="train", task="t0", attempt=0, node="")
    outcome = TransferResult(
        data=DataRef(DataKind.FETCH, 0), task="t0", at=driver.clock.now(), url="file:///data", digest=DIGEST, size=10240
    )
    driver.seen.append(
        TransferEnded(at=driver.clock.now(), key=key, data=DataRef(DataKind.FETCH, 0), url="file:///data", outcome=outcome)
    )
    driver.settle()
    assert list(driver.directory.blobs.iterdir()) == []


def test_an_archive_that_comes_too_late_is_removed(driver: Driver) -> None:
    driver.add(workflow(plan(tasks=1)))
    driver.settle()
    driver.backend.holds_outputs = True
    driver.advance(61.0)
    key = AttemptKey(workflow="u1", group="train", task="t0", attempt=0, node="n1")
    for digest in (DIGEST, "1" * 64):
        (driver.directory.blobs / digest).touch()
        driver.seen.append(Collected(at=driver.clock.now(), key=key, checkpoint=CheckpointRef(0), digest=digest, size=10240))

    driver.settle()
    assert len(list(driver.directory.blobs.iterdir())) == 2
    stored(driver, error="it is no archive")
    driver.settle()
    assert list(driver.directory.blobs.iterdir()) == [driver.directory.blobs / DIGEST]


def test_an_archive_that_a_restart_has_brought_is_not_removed_while_a_lost_node_is_looked_for(driver: Driver) -> None:
    top = group_plan("top", 1, world=False)
    bottom = group_plan("bottom", 1, world=False, after=("top",), inputs=(InputSpec(position=0, task="t0"),))
    bottom = replace(bottom, launches=tuple(replace(launch, task="b") for launch in bottom.launches))
    driver.add(workflow(top, bottom))
    driver.settle()
    driver.advance(5.0)
    driver.backend.cut("n1")
    driver.advance(200.0)
    record = driver.record("u1")
    (digest,) = archives(record)
    assert (record.reason, record.group("bottom").task("b").orphan) == (Reason.NODE_LOST, OrphanState.UNREACHABLE)
    # `restart` fetches what was kept, and stores the new workflow a moment later.
    (driver.directory.blobs / digest).touch()
    driver.settle()
    assert (driver.directory.blobs / digest).exists()


def test_credentials_that_cannot_be_read_end_the_gang_that_needs_them_and_no_supervisor(driver: Driver) -> None:
    inputs = (DataSpec(position=0, url="s3://b/in"),)
    driver.add(workflow(group_plan(tasks=1, world=False, gpus=0, url_inputs=inputs)))
    driver.add(workflow(group_plan(tasks=1, world=False, gpus=0), uuid="u2"))
    driver.transfers.identity = unreadable  # type: ignore[method-assign]
    driver.settle()
    # They could be read when the input was looked up.
    key, at = AttemptKey(workflow="u1", group="train", task="t0", attempt=0, node=""), driver.clock.now()
    found = TransferResult(data=DataRef(DataKind.FETCH, 0), task="t0", at=at, url="s3://b/in", is_direct=True)
    driver.seen.append(TransferEnded(at=at, key=key, data=DataRef(DataKind.FETCH, 0), url="s3://b/in", outcome=found))
    driver.settle()
    record = driver.record("u1")
    assert record.status == "FAILED_START_ERROR"
    assert record.groups[0].message == "t0: the credential bucket cannot be read"
    assert driver.record("u2").groups[0].state is State.RUNNING


def test_what_is_written_by_one_who_could_not_wake_the_supervisor_is_found_all_the_same(driver: Driver) -> None:
    driver.add(workflow(group_plan(tasks=1, world=False, gpus=0)))
    driver.settle()
    unheard = workflow(group_plan(tasks=1, world=False, gpus=0), uuid="u2")
    driver.add(unheard)
    driver.cancel()
    driver.settle()
    assert driver.record("u1").status == "FAILED_CANCELED"
    assert driver.record("u2").groups[0].state is State.RUNNING


@pytest.mark.parametrize("table", ["groups", "documents"])
def test_a_workflow_that_another_distflow_wrote_is_left_alone_and_the_others_go_on(driver: Driver, table: str) -> None:
    for uuid in ("u1", "u2"):
        driver.add(workflow(group_plan(tasks=1, world=False, gpus=0), uuid=uuid))
    column = {"groups": "record", "documents": "plan"}[table]
    theirs = b'{"name": "train", "shape": "another"}'
    driver.reader._db.execute(f"UPDATE {table} SET {column} = ? WHERE workflow = 'u1'", (theirs,))
    driver.settle()
    assert driver.reader.find("u2").groups[0].state is State.RUNNING
    assert driver.supervisor.unreadable == {"u1"}
    assert driver.reader._db.execute(f"SELECT {column} FROM {table} WHERE workflow = 'u1'").fetchone() == (theirs,)
    assert [line for line in driver.log if "u1" in line] == [
        "the record of workflow u1 cannot be read and is not changed: another version of distflow wrote it"
    ]


@pytest.mark.parametrize("jump_s", [-3600.0, 3600.0])
def test_a_clock_that_was_set_while_no_supervisor_ran_makes_no_wait_longer(driver: Driver, jump_s: float) -> None:
    one = workflow(group_plan(tasks=1, world=False, gpus=0, retry=Retry(limit=3, backoff_s=8.0)))
    at = driver.clock.now()
    resting = replace(
        one.record.groups[0], attempt=1, state=State.SCHEDULING, scheduling_at=at + 8.0 - jump_s,
        resting_until=at + 8.0 - jump_s,
        tasks=tuple(replace(task, attempt=1, state=State.SCHEDULING) for task in one.record.groups[0].tasks),
    )  # fmt: skip
    driver.add(replace(one, record=replace(one.record, groups=(resting,))))
    driver.settle()
    driver.advance(8.0)
    driver.advance(1.0)
    assert driver.record("u1").groups[0].state is State.RUNNING


def test_a_request_to_cancel_by_a_clock_that_was_set_forward_makes_no_wait_longer(driver: Driver) -> None:
    driver.add(workflow(plan(tasks=1)))
    driver.settle()
    driver.backend.holds_outputs = True
    request = CancelRequest(at=driver.clock.now() + 3600.0, by="me")
    driver.reader.request_cancel("u1", request, Event(at=0.0, details=CancelRequested(user=""), workflow="u1"))
    driver.settle()
    assert not driver.record("u1").state.is_final
    driver.advance(CANCELED_S + 1.0)
    driver.advance(1.0)
    assert driver.record("u1").status == "FAILED_CANCELED"
