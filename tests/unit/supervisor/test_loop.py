"""The loop, on a store and a clock that is turned by hand: what is kept of archives, and for how long."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from distflow.backends.base import AttemptKey, CheckpointRef, Collected, Observation
from distflow.errors import StateError
from distflow.lifecycle.states import Reason, State
from distflow.pools.model import Pool
from distflow.spec.model import DataSpec, InputSpec, Retry
from distflow.state.event_details import CancelRequested
from distflow.state.mirror import Mirror
from distflow.state.record import CancelRequest, Carried, DataKind, DataRef, Event, Stray
from distflow.state.store import Store
from distflow.supervisor.carrying import TransferEnded
from distflow.supervisor.checkpointing import CANCELED_S
from distflow.supervisor.handover import archives
from distflow.supervisor.loop import Supervisor
from distflow.supervisor.world import Workflow
from distflow.testing.backend import Behaviour, FakeBackend
from distflow.testing.clock import FakeClock
from distflow.testing.waiting import wait_until
from unit.supervisor.gangs import group_plan, node, pool, workflow
from unit.supervisor.test_checkpointing import plan

DIGEST = "0" * 64


def behave(key: AttemptKey) -> Behaviour:
    return Behaviour(seconds=5.0 if key.group == "top" else float("inf"))


def unreadable(_: str) -> None:
    raise StateError("the credential bucket cannot be read")


class Bench:
    """A supervisor that takes one step when it is told."""

    def __init__(self, folder: Path) -> None:
        self.blobs = folder / "blobs"
        for made in (self.blobs, folder / "secrets"):
            made.mkdir()
        self.clock, self.store = FakeClock(), Store(folder / "store.sqlite3")
        self.said: list[str] = []
        self.supervisor = Supervisor(
            self.store,
            Mirror(folder / "logs"),
            folder / "secrets",
            self.blobs,
            self.clock,
            self._open,
            self.said.append,
            unreadable,
        )

    def _open(self, pool: Pool, sink: Callable[[Observation], None]) -> FakeBackend:
        self.backend = FakeBackend(pool, clock=self.clock, sink=sink, behaviour=behave)
        return self.backend

    def submit(self, one: Workflow) -> None:
        """Store a workflow, as a command does."""
        self.store.submit(replace(one.record, name=one.record.uuid), template="", spec="", plan=one.plan, pool=pool(node("n1")))

    def cancel(self) -> None:
        """End ``u1`` at once, as a command does."""
        request = CancelRequest(at=self.clock.now(), by="me", force=True)
        self.store.request_cancel("u1", request, Event(at=0.0, details=CancelRequested(user=""), workflow="u1"))
        self.step()
        assert self.store.find("u1").state.is_final

    def step(self, seconds: float = 0.0) -> None:
        """Let time pass, and the supervisor look at the store and at what was seen, and do what follows."""
        self.clock.advance(seconds)
        if seconds:
            self.backend.tick()
        for _ in range(5):
            self.supervisor.wake()
            self.supervisor._wait(self.clock.now())
            self.supervisor._settle()


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path)
    yield made
    made.store.close()


def test_an_archive_that_comes_when_nobody_takes_it_any_more_is_removed(bench: Bench) -> None:
    bench.submit(workflow(plan(tasks=1)))
    bench.submit(workflow(group_plan(tasks=1, gpus=0), uuid="u2"))
    bench.step()
    bench.backend.holds_outputs = True
    bench.step(61.0)
    bench.cancel()
    (bench.blobs / DIGEST).touch()
    key = AttemptKey(workflow="u1", group="train", task="t0", attempt=0, node="n1")
    bench.supervisor.tell(Collected(at=bench.clock.now(), key=key, checkpoint=CheckpointRef(0), digest=DIGEST, size=10240))
    bench.step()
    assert list(bench.blobs.iterdir()) == []


def test_an_input_that_comes_when_nobody_takes_it_any_more_is_removed(bench: Bench) -> None:
    """Its transfer had just ended when the cancel came."""
    bench.submit(workflow(group_plan(tasks=1)))
    bench.submit(workflow(group_plan(tasks=1, gpus=0), uuid="u2"))
    bench.step()
    bench.cancel()
    (bench.blobs / DIGEST).touch()
    key = AttemptKey(workflow="u1", group="train", task="t0", attempt=0, node="")
    outcome = Carried(
        data=DataRef(DataKind.FETCH, 0), task="t0", at=bench.clock.now(), url="file:///data", digest=DIGEST, size=10240
    )
    bench.supervisor.tell(
        TransferEnded(at=bench.clock.now(), key=key, data=DataRef(DataKind.FETCH, 0), url="file:///data", outcome=outcome)
    )
    bench.step()
    assert list(bench.blobs.iterdir()) == []


def test_an_archive_that_comes_too_late_is_removed(bench: Bench) -> None:
    bench.submit(workflow(plan(tasks=1)))
    bench.step()
    bench.backend.holds_outputs = True
    bench.step(61.0)
    key = AttemptKey(workflow="u1", group="train", task="t0", attempt=0, node="n1")
    for digest in (DIGEST, "1" * 64):
        (bench.blobs / digest).touch()
        bench.supervisor.tell(Collected(at=bench.clock.now(), key=key, checkpoint=CheckpointRef(0), digest=digest, size=10240))

    def is_removed() -> bool:
        bench.step()
        return not (bench.blobs / ("1" * 64)).exists()

    wait_until(is_removed, 20, "the first one to be given up, as it is no archive")
    assert (bench.blobs / DIGEST).exists()


def test_an_archive_that_a_restart_has_brought_is_not_removed_while_a_lost_node_is_looked_for(bench: Bench) -> None:
    top = group_plan("top", 1, world=False)
    bottom = group_plan("bottom", 1, world=False, after=("top",), inputs=(InputSpec(position=0, task="t0"),))
    bottom = replace(bottom, launches=tuple(replace(launch, task="b") for launch in bottom.launches))
    bench.submit(workflow(top, bottom))
    bench.step()
    bench.step(5.0)
    bench.backend.cut("n1")
    bench.step(200.0)
    record = bench.store.find("u1")
    (digest,) = archives(record)
    assert (record.reason, record.group("bottom").task("b").stray) == (Reason.NODE_LOST, Stray.OUT_OF_REACH)
    # `restart` fetches what was kept, and stores the new workflow a moment later.
    (bench.blobs / digest).touch()
    bench.step()
    assert (bench.blobs / digest).exists()


def test_credentials_that_cannot_be_read_end_the_gang_that_needs_them_and_no_supervisor(bench: Bench) -> None:
    inputs = (DataSpec(position=0, url="s3://b/in"),)
    bench.submit(workflow(group_plan(tasks=1, world=False, gpus=0, url_inputs=inputs)))
    bench.submit(workflow(group_plan(tasks=1, world=False, gpus=0), uuid="u2"))
    bench.supervisor._mover.begin = lambda *_: None  # type: ignore[method-assign]
    bench.step()
    # They could be read when the input was looked up.
    key, at = AttemptKey(workflow="u1", group="train", task="t0", attempt=0, node=""), bench.clock.now()
    found = Carried(data=DataRef(DataKind.FETCH, 0), task="t0", at=at, url="s3://b/in", is_direct=True)
    bench.supervisor.tell(TransferEnded(at=at, key=key, data=DataRef(DataKind.FETCH, 0), url="s3://b/in", outcome=found))
    bench.step()
    record = bench.store.find("u1")
    assert record.status == "FAILED_START_ERROR"
    assert record.groups[0].message == "t0: the credential bucket cannot be read"
    assert bench.store.find("u2").groups[0].state is State.RUNNING


def test_what_is_written_by_one_who_could_not_wake_the_supervisor_is_found_all_the_same(bench: Bench) -> None:
    bench.submit(workflow(group_plan(tasks=1, world=False, gpus=0)))
    bench.step()
    unheard = workflow(group_plan(tasks=1, world=False, gpus=0), uuid="u2")
    with Store(bench.store.path) as theirs:
        theirs.submit(replace(unheard.record, name="theirs"), template="", spec="", plan=unheard.plan, pool=pool(node("n1")))
        request = CancelRequest(at=bench.clock.now(), by="me")
        theirs.request_cancel("u1", request, Event(at=0.0, details=CancelRequested(user=""), workflow="u1"))
    for _ in range(5):
        bench.supervisor._wait(bench.clock.now())
        bench.supervisor._settle()
    assert bench.store.find("u1").status == "FAILED_CANCELED"
    assert bench.store.find("u2").groups[0].state is State.RUNNING


@pytest.mark.parametrize("table", ["groups", "documents"])
def test_a_workflow_that_another_distflow_wrote_is_left_alone_and_the_others_go_on(bench: Bench, table: str) -> None:
    for uuid in ("u1", "u2"):
        bench.submit(workflow(group_plan(tasks=1, world=False, gpus=0), uuid=uuid))
    column = {"groups": "record", "documents": "plan"}[table]
    theirs = b'{"name": "train", "shape": "another"}'
    bench.store._db.execute(f"UPDATE {table} SET {column} = ? WHERE workflow = 'u1'", (theirs,))
    bench.step()
    assert bench.store.find("u2").groups[0].state is State.RUNNING
    assert bench.supervisor.unreadable == {"u1"}
    assert bench.store._db.execute(f"SELECT {column} FROM {table} WHERE workflow = 'u1'").fetchone() == (theirs,)
    assert [line for line in bench.said if "u1" in line] == [
        "the record of workflow u1 cannot be read: another version of distflow wrote it; it stays as it is"
    ]


@pytest.mark.parametrize("jump_s", [-3600.0, 3600.0])
def test_a_clock_that_was_set_while_no_supervisor_ran_makes_no_wait_longer(bench: Bench, jump_s: float) -> None:
    one = workflow(group_plan(tasks=1, world=False, gpus=0, retry=Retry(limit=3, backoff_s=8.0)))
    at = bench.clock.now()
    resting = replace(
        one.record.groups[0], attempt=1, state=State.SCHEDULING, scheduling_at=at + 8.0 - jump_s,
        resting_until=at + 8.0 - jump_s,
        tasks=tuple(replace(task, attempt=1, state=State.SCHEDULING) for task in one.record.groups[0].tasks),
    )  # fmt: skip
    bench.submit(replace(one, record=replace(one.record, groups=(resting,))))
    bench.step()
    bench.step(8.0)
    bench.step(1.0)
    assert bench.store.find("u1").groups[0].state is State.RUNNING


def test_a_request_to_cancel_by_a_clock_that_was_set_forward_makes_no_wait_longer(bench: Bench) -> None:
    bench.submit(workflow(plan(tasks=1)))
    bench.step()
    bench.backend.holds_outputs = True
    request = CancelRequest(at=bench.clock.now() + 3600.0, by="me")
    bench.store.request_cancel("u1", request, Event(at=0.0, details=CancelRequested(user=""), workflow="u1"))
    bench.step()
    assert not bench.store.find("u1").state.is_final
    bench.step(CANCELED_S + 1.0)
    bench.step(1.0)
    assert bench.store.find("u1").status == "FAILED_CANCELED"
