"""The supervisor's loop: removal of archives, lost wake-ups, unreadable records, missing backends, and changed clocks."""

from __future__ import annotations

import pytest

from distflow.backends.base import AttemptKey, Backend, CheckpointRef, Collected, NodeUp, Sink
from distflow.errors import InputError, StateError
from distflow.lifecycle.states import Reason, State
from distflow.pools.model import Pool
from distflow.spec.model import DataSpec, InputSpec, Retry
from distflow.state.event_details import CancelRequested
from distflow.state.record import CancelRequest, DataKind, DataRef, EventRecord, OrphanState, TransferRecord
from distflow.storage.credentials import Identity
from distflow.structs import replace
from distflow.supervisor.checkpoints import CANCELED_S
from distflow.supervisor.commands import TransferEnded
from distflow.supervisor.transfers import archives
from distflow.testing.backend import Behavior
from unit.supervisor.gangs import Driver, group_plan, node, pool, workflow
from unit.supervisor.test_checkpoints import end_store, plan

DIGEST = "0" * 64


def behave(key: AttemptKey) -> Behavior:
    return Behavior(seconds=5.0 if key.group == "top" else float("inf"))


def refuse_to_read(url: str) -> Identity | None:
    raise StateError("the credential bucket cannot be read", hint="set the credential again")


@pytest.fixture
def driver() -> Driver:
    return Driver(on=pool(node("n1")), behavior=behave)


def force_cancel(driver: Driver) -> None:
    """Cancel ``u1`` with force."""
    driver.cancel(force=True)
    driver.settle()
    assert driver.record().state.is_final


def test_archive_of_a_canceled_workflow_is_removed(driver: Driver) -> None:
    driver.add(workflow(plan(tasks=1)))
    driver.add(workflow(group_plan(tasks=1, gpus=0), uuid="u2"))
    driver.settle()
    driver.backend.holds_outputs = True
    driver.advance(61.0)
    force_cancel(driver)
    (driver.directory.blobs / DIGEST).touch()
    key = AttemptKey(workflow="u1", group="train", task="t0", attempt=0, node="n1")
    driver.observations.append(
        Collected(at=driver.clock.now(), key=key, checkpoint=CheckpointRef(0), digest=DIGEST, size=10240)
    )
    driver.settle()
    assert list(driver.directory.blobs.iterdir()) == []


def test_input_of_a_canceled_workflow_is_removed(driver: Driver) -> None:
    """The transfer had just ended when the workflow was canceled."""
    driver.add(workflow(group_plan(tasks=1)))
    driver.add(workflow(group_plan(tasks=1, gpus=0), uuid="u2"))
    driver.settle()
    force_cancel(driver)
    (driver.directory.blobs / DIGEST).touch()
    key = AttemptKey(workflow="u1", group="train", task="t0", attempt=0, node="")
    outcome = TransferRecord(
        data=DataRef(DataKind.FETCH, 0), task="t0", at=driver.clock.now(), url="file:///data", digest=DIGEST, size=10240
    )
    driver.observations.append(
        TransferEnded(at=driver.clock.now(), key=key, data=DataRef(DataKind.FETCH, 0), url="file:///data", outcome=outcome)
    )
    driver.settle()
    assert list(driver.directory.blobs.iterdir()) == []


def test_checkpoint_that_arrives_during_the_write_of_another_is_removed(driver: Driver) -> None:
    driver.add(workflow(plan(tasks=1)))
    driver.settle()
    driver.backend.holds_outputs = True
    driver.advance(61.0)
    key = AttemptKey(workflow="u1", group="train", task="t0", attempt=0, node="n1")
    for digest in (DIGEST, "1" * 64):
        (driver.directory.blobs / digest).touch()
        driver.observations.append(
            Collected(at=driver.clock.now(), key=key, checkpoint=CheckpointRef(0), digest=digest, size=10240)
        )

    driver.settle()
    assert len(list(driver.directory.blobs.iterdir())) == 2
    end_store(driver, error="it is not an archive")
    driver.settle()
    assert list(driver.directory.blobs.iterdir()) == [driver.directory.blobs / DIGEST]


def test_archive_of_a_restart_is_kept_while_orphans_of_the_ended_workflow_remain(driver: Driver) -> None:
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
    # `restart` fetches the outputs of kept groups, and stores the new workflow a moment later.
    (driver.directory.blobs / digest).touch()
    driver.settle()
    assert (driver.directory.blobs / digest).exists()


def test_unreadable_credentials_end_only_the_gang_that_needs_them(driver: Driver) -> None:
    inputs = (DataSpec(position=0, url="s3://b/in"),)
    driver.add(workflow(group_plan(tasks=1, world=False, gpus=0, url_inputs=inputs)))
    driver.add(workflow(group_plan(tasks=1, world=False, gpus=0), uuid="u2"))
    driver.transfers.identity = refuse_to_read  # type: ignore[method-assign]
    driver.settle()
    # The credentials could be read when the input was looked up.
    key, at = AttemptKey(workflow="u1", group="train", task="t0", attempt=0, node=""), driver.clock.now()
    found = TransferRecord(data=DataRef(DataKind.FETCH, 0), task="t0", at=at, url="s3://b/in", is_direct=True)
    driver.observations.append(TransferEnded(at=at, key=key, data=DataRef(DataKind.FETCH, 0), url="s3://b/in", outcome=found))
    driver.settle()
    record = driver.record("u1")
    assert record.status == "FAILED_START_ERROR"
    assert record.groups[0].message == "t0: the credential bucket cannot be read; set the credential again"
    assert driver.record("u2").groups[0].state is State.RUNNING


def test_new_work_is_found_although_the_wake_up_was_lost(driver: Driver) -> None:
    driver.add(workflow(group_plan(tasks=1, world=False, gpus=0)))
    driver.settle()
    driver.add(workflow(group_plan(tasks=1, world=False, gpus=0), uuid="u2"))
    driver.cancel()
    driver.settle()
    assert driver.record("u1").status == "FAILED_CANCELED"
    assert driver.record("u2").groups[0].state is State.RUNNING


@pytest.mark.parametrize("table", ["groups", "documents"])
def test_workflow_of_another_version_is_not_changed_and_others_continue(driver: Driver, table: str) -> None:
    for uuid in ("u1", "u2"):
        driver.add(workflow(group_plan(tasks=1, world=False, gpus=0), uuid=uuid))
    column = {"groups": "record", "documents": "plan"}[table]
    foreign = b'{"name": "train", "shape": "another"}'
    driver.reader._db.execute(f"UPDATE {table} SET {column} = ? WHERE workflow = 'u1'", (foreign,))
    driver.settle()
    assert driver.reader.find("u2").groups[0].state is State.RUNNING
    assert set(driver.supervisor.skipped) == {"u1"}
    assert driver.reader._db.execute(f"SELECT {column} FROM {table} WHERE workflow = 'u1'").fetchone() == (foreign,)
    assert [line for line in driver.log if "cannot be read" in line] == [
        "the record of workflow w-1 cannot be read and is not changed: another version of distflow wrote it; use that one"
    ]


@pytest.mark.parametrize("backend", ["ssh", "kubernetes"])
def test_running_workflow_is_resumed_after_its_backend_was_not_installed(
    driver: Driver, monkeypatch: pytest.MonkeyPatch, backend: str
) -> None:
    def refuse(*_: object) -> Backend:
        raise InputError("pool lab needs the package `x`", hint="run: pip install x")

    driver.add(workflow(group_plan(tasks=1)))
    driver.settle()
    with monkeypatch.context() as missing:
        missing.setattr(driver, "open_backend", refuse)
        driver.restart()
        missing.setattr(driver.supervisor._store, "pool", lambda _: pool(backend=backend))
        driver.add(workflow(group_plan(tasks=1), uuid="u2"))
        driver.settle()
    assert driver.log[-1] == (
        "cannot supervise workflow w-1, and its tasks continue: pool lab needs the package `x`; run: pip install x"
    )
    assert set(driver.supervisor.skipped) == {"u1"}
    assert driver.record("u1").groups[0].state is State.RUNNING
    assert driver.record("u2").status == "FAILED_START_ERROR"
    assert driver.group("u2").message == "pool lab needs the package `x`; run: pip install x"
    driver.restart()
    driver.settle()
    assert driver.supervisor.skipped == set()
    assert driver.record("u1").groups[0].state is State.RUNNING


def test_backend_gets_the_name_of_the_pool_and_its_observations_get_the_key(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[tuple[Pool, Sink]] = []

    def open_backend(pool: Pool, sink: Sink) -> Backend:
        opened.append((pool, sink))
        return driver.backend

    monkeypatch.setattr(driver.supervisor, "_open_backend", open_backend)
    one = workflow(group_plan(tasks=1))
    driver.add(replace(one, record=replace(one.record, pool_key="lab-3f2a91bc")))
    driver.step()
    ((opened_pool, sink),) = opened
    assert opened_pool.name == "lab"
    sink(NodeUp(at=driver.clock.now(), pool=opened_pool.name, node="n1"))
    driver.supervisor.step(0.0)
    assert [key for key, view in driver.supervisor.snapshot().nodes.items() if view.up] == [("lab-3f2a91bc", "n1")]


@pytest.mark.parametrize("jump_s", [-3600.0, 3600.0])
def test_clock_that_was_set_while_no_supervisor_ran_does_not_lengthen_waits(driver: Driver, jump_s: float) -> None:
    one = workflow(group_plan(tasks=1, world=False, gpus=0, retry=Retry(limit=3, backoff_s=8.0)))
    at = driver.clock.now()
    in_backoff = replace(
        one.record.groups[0], attempt=1, state=State.SCHEDULING, scheduling_at=at + 8.0 - jump_s,
        backoff_until=at + 8.0 - jump_s,
        tasks=tuple(replace(task, attempt=1, state=State.SCHEDULING) for task in one.record.groups[0].tasks),
    )  # fmt: skip
    driver.add(replace(one, record=replace(one.record, groups=(in_backoff,))))
    driver.settle()
    driver.advance(8.0)
    driver.advance(1.0)
    assert driver.record("u1").groups[0].state is State.RUNNING


def test_cancel_request_from_a_fast_clock_does_not_lengthen_waits(driver: Driver) -> None:
    driver.add(workflow(plan(tasks=1)))
    driver.settle()
    driver.backend.holds_outputs = True
    request = CancelRequest(at=driver.clock.now() + 3600.0, by="me")
    driver.reader.request_cancel("u1", request, EventRecord(at=0.0, details=CancelRequested(user=""), workflow="u1"))
    driver.settle()
    assert not driver.record("u1").state.is_final
    driver.advance(CANCELED_S + 1.0)
    driver.advance(1.0)
    assert driver.record("u1").status == "FAILED_CANCELED"
