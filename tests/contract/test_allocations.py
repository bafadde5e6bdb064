"""The backend for allocated nodes, with an in-memory engine whose hosts are this machine."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import pytest

from distflow.backends.allocated import backend
from distflow.backends.allocated.backend import AllocatedBackend
from distflow.backends.allocated.engine import AllocationState, Over, host_of, node_name
from distflow.backends.base import (
    AttemptKey,
    Ended,
    Leased,
    LeaseRefused,
    LeaseRequest,
    LeaseWaits,
    LogComplete,
    NodeDown,
    NodeUp,
    Observation,
    Prepared,
    Started,
    Unanswered,
)
from distflow.errors import NodeUnreachable
from distflow.lifecycle.states import Reason
from distflow.plan.credentials import TaskSecrets
from distflow.plan.model import BoundLaunch
from distflow.pools.model import Node, Pool
from distflow.runtime.files import records
from distflow.testing.local_engine import LocalEngine
from distflow.testing.waiting import wait_until
from distflow.transports.base import Transport
from distflow.transports.local import LocalChannel, LocalTransport

W1, W2 = "1" * 32, "2" * 32
T = TypeVar("T", bound=Observation)


class Logs:
    def __init__(self) -> None:
        self.text: dict[tuple[str, str], bytes] = {}

    def resume_position(self, key: AttemptKey, kind: str) -> tuple[str, int]:
        return f"output.{kind}", len(self.text.get((key.name, f"output.{kind}"), b""))

    def has_room(self) -> bool:
        return True

    def write(self, key: AttemptKey, file: str, offset: int, data: bytes) -> None:
        self.text[key.name, file] = self.text.get((key.name, file), b"")[:offset] + data

    def record_heartbeat(self, key: AttemptKey, at: float) -> None:
        pass


class Bench:
    """A backend on a local engine, and its observations."""

    def __init__(self, folder: Path, engine: LocalEngine) -> None:
        template = Node(
            name="", host="", address="127.0.0.1", root=str(folder / "node"), python=sys.executable,
            lease_dir=str(folder / "leases"), check_capacity=False,
        )  # fmt: skip
        self.pool = Pool(name="p", backend="slurm", nodes=(), template=template)
        (folder / "blobs").mkdir(exist_ok=True)
        self.engine = engine
        self.observations: list[Observation] = []
        self.logs = Logs()
        self.backend = AllocatedBackend(
            self.pool, engine, blobs=folder / "blobs", sink=self.observations.append, logs=self.logs
        )

    def request(self, *tasks: str, workflow: str = W1, attempt: int = 0) -> LeaseRequest:
        return LeaseRequest(
            workflow=workflow, group="g", attempt=attempt, nodes=dict.fromkeys(tasks, ""), gpus=dict.fromkeys(tasks, 0),
            master=tasks[0], port="any", start_timeout_s=60.0, workflow_id="w-1",
        )  # fmt: skip

    def await_one(self, kind: type[T], **match: object) -> T:
        def find() -> T | None:
            for one in self.observations:
                if isinstance(one, kind) and all(getattr(one, name) == value for name, value in match.items()):
                    return one
            return None

        try:
            return wait_until(find, 30, f"{kind.__name__} {match}")
        except TimeoutError as error:
            raise TimeoutError(f"{error}; observations: {self.observations}") from None

    def lease(self, *tasks: str, workflow: str = W1, attempt: int = 0) -> list[AttemptKey]:
        request = self.request(*tasks, workflow=workflow, attempt=attempt)
        self.backend.lease(request)
        binding = self.await_one(Leased, workflow=workflow, attempt=attempt).binding
        return [
            AttemptKey(workflow=workflow, group="g", task=task, attempt=attempt, node=binding.tasks[task].node)
            for task in tasks
        ]

    def start(self, key: AttemptKey, script: str) -> int:
        """Start a leased attempt and return the pid of its command."""
        launch = BoundLaunch(task=key.task, node=key.node, argv=("sh", "-c", script), environment={})
        self.backend.prepare(key, launch, TaskSecrets(), 5.0)
        self.await_one(Prepared, key=key)
        self.backend.start(key)
        pid = self.await_one(Started, key=key).pid
        assert pid is not None
        return pid


@pytest.fixture
def engine() -> LocalEngine:
    return LocalEngine()


@pytest.fixture
def bench(tmp_path: Path, engine: LocalEngine) -> Iterator[Bench]:
    made = Bench(tmp_path, engine)
    yield made
    for started in [one for one in made.observations if isinstance(one, Started)]:
        if not any(isinstance(one, Ended) and one.key == started.key for one in made.observations):
            made.backend.stop(started.key, grace_s=0.0, why="test")
            made.await_one(Ended, key=started.key)
    made.backend.keep(())
    made.backend.close()
    made.backend.close()


def test_a_gang_waits_with_the_engines_reason_and_gets_a_node_for_each_task(bench: Bench) -> None:
    bench.engine.grants_at_once = False
    bench.engine.given_notice = "every node gets the largest shape"
    bench.backend.lease(bench.request("a", "b"))
    bench.await_one(LeaseWaits, message="every node gets the largest shape")
    bench.await_one(LeaseWaits, message="waits for resources (Resources)")
    bench.engine.grant("1")
    tasks = bench.await_one(Leased).binding.tasks
    assert {task: one.node for task, one in tasks.items()} == {"a": "h0@1", "b": "h1@1"}
    assert [one.label for one in bench.engine.requests] == ["w-1/g"]
    keys = [AttemptKey(workflow=W1, group="g", task=task, attempt=0, node=one.node) for task, one in tasks.items()]
    for key in keys:
        bench.start(key, f"echo {key.task}; exit 0")
    for key in keys:
        assert bench.await_one(Ended, key=key).end["exit_code"] == 0
        bench.await_one(LogComplete, key=key)
        assert bench.logs.text[key.name, "output.log"].decode() == f"{key.task}\n"
    bench.backend.keep(())
    wait_until(lambda: bench.engine.released == ["1"], what="the allocation is released")
    for node in ("h0@1", "h1@1"):
        bench.await_one(NodeDown, node=node)
    bench.backend.start(keys[0])
    bench.await_one(Unanswered, key=keys[0])


@pytest.mark.parametrize(
    ("over", "reason"),
    [
        (Over(reason=Reason.PREEMPTED, message="preempted by job 7"), Reason.PREEMPTED),
        (Over(reason=None, message="the program of another node failed", is_failure=True), Reason.NODE_LOST),
    ],
)
def test_the_engines_reason_for_an_end_replaces_the_signal(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, over: Over, reason: Reason
) -> None:
    monkeypatch.setattr(backend, "_RECOVERY_S", 2.0)
    killed, other = bench.lease("a", "b")
    pid = bench.start(killed, "sleep 600")
    bench.start(other, "trap '' TERM; sleep 600")
    os.kill(pid, signal.SIGTERM)
    # Otherwise, the backend might query the engine before the end of the command is reported.
    wait_until(lambda: any(one.doubtful for one in bench.backend._records.values()), 20, "the end of the command is held back")
    bench.engine.end("1", over)
    end = bench.await_one(Ended, key=killed).end
    assert (end["reason"], end["allocation"], end["message"]) == ("allocation_over", reason, over.message)
    assert end["signal"] == signal.SIGTERM
    assert bench.await_one(Ended, key=other).end["allocation"] is reason
    bench.await_one(LogComplete, key=other)
    assert len([one for one in bench.observations if isinstance(one, Ended)]) == 2
    # The in-memory engine ends no processes, so end the other task here.
    bench.observations.clear()
    second = Bench(Path(bench.pool.template.root).parent, bench.engine)  # type: ignore[union-attr]
    second.engine.grant("1")
    second.backend.watch([other])
    second.await_one(Started, key=other)
    second.backend.stop(other, grace_s=0.0, why="test")
    second.await_one(Ended, key=other)
    second.backend.close()


class CountedEngine(LocalEngine):
    """An engine that counts the queries for states."""

    queries = 0

    def states(self, ids: Mapping[str, Sequence[str]]) -> Mapping[str, AllocationState]:
        self.queries += 1
        return super().states(ids)


@pytest.mark.slow
@pytest.mark.parametrize("engine", [CountedEngine()])
@pytest.mark.parametrize("ended", ["command", "keeper"])
def test_a_failure_is_held_back_until_the_engine_reports_the_end_of_the_allocation(
    bench: Bench, engine: CountedEngine, ended: str
) -> None:
    (key,) = bench.lease("a")
    pid = bench.start(key, "sleep 600")
    state = records.read_state(str(next(Path(bench.pool.node(key.node).root).rglob(records.STATE)).parent))
    assert state is not None
    before = engine.queries
    os.kill(pid if ended == "command" else state["keeper"]["pid"], signal.SIGTERM)
    # The first query follows at once, and further ones only while the failure is held back.
    wait_until(lambda: engine.queries > before + 1, 30, "the engine is queried again")
    engine.end(host_of(key.node)[1], Over(reason=Reason.NODE_LOST, message="n2 failed"))
    end = bench.await_one(Ended, key=key).end
    assert (end["reason"], end["allocation"]) == ("allocation_over", Reason.NODE_LOST)


def test_a_failure_in_a_running_allocation_is_reported_with_its_exit_code(bench: Bench) -> None:
    (key,) = bench.lease("a")
    bench.start(key, "exit 3")
    end = bench.await_one(Ended, key=key).end
    assert (end["reason"], end["exit_code"]) == ("exited", 3)


@pytest.mark.slow
def test_a_failure_is_reported_although_the_engine_does_not_answer(bench: Bench) -> None:
    (key,) = bench.lease("a")
    bench.start(key, "read line; exit 3")
    bench.engine.is_away = True
    assert bench.await_one(Ended, key=key).end["exit_code"] == 3
    bench.engine.is_away = False


class EngineWithLinks(LocalEngine):
    """An engine whose links to the nodes can be cut."""

    def __init__(self) -> None:
        super().__init__()
        self.is_cut = False
        self.channels: list[LocalChannel] = []

    def transport(self, allocation_id: str, host: str) -> Transport:
        engine = self

        class Link(LocalTransport):
            def open(self, argv: Sequence[str]) -> LocalChannel:
                if engine.is_cut:
                    raise NodeUnreachable(host, "its login node does not answer")
                engine.channels.append(super().open(argv))
                return engine.channels[-1]

        return Link(node_name(host, allocation_id))

    def cut(self) -> None:
        self.is_cut = True
        for channel in self.channels:
            channel.close()


@pytest.mark.parametrize("engine", [EngineWithLinks()])
def test_a_silent_node_is_reported_again_when_its_engine_falls_silent_or_answers(bench: Bench, engine: EngineWithLinks) -> None:
    (key,) = bench.lease("a")
    bench.start(key, "sleep 600")
    engine.is_away = True
    engine.cut()
    bench.await_one(NodeDown, node=key.node, is_engine_away=True)
    bench.observations.clear()
    engine.is_away = False
    bench.await_one(NodeDown, node=key.node, is_engine_away=False)
    engine.is_cut = False
    bench.await_one(NodeUp, node=key.node)
    bench.await_one(Started, key=key)


def test_requests_to_an_engine_that_does_not_answer_are_repeated(bench: Bench) -> None:
    bench.engine.is_away = True
    bench.backend.lease(bench.request("a"))
    assert "the controller does not answer" in bench.await_one(LeaseWaits).message
    bench.engine.is_away = False
    bench.await_one(Leased)
    assert not bench.backend.is_releasing()
    bench.engine.is_away = True
    bench.backend.keep(())
    assert bench.backend.is_releasing()
    bench.engine.is_away = False
    wait_until(lambda: not bench.backend.is_releasing(), what="the allocation is released")
    assert bench.engine.released == ["1"]


def test_a_refused_request_is_final(bench: Bench) -> None:
    bench.engine.refusal = "sbatch: error: invalid partition specified: nope"
    bench.backend.lease(bench.request("a"))
    refused = bench.await_one(LeaseRefused)
    assert refused.is_final
    assert list(refused.nodes.values()) == ["sbatch: error: invalid partition specified: nope"]


@pytest.mark.parametrize(("reason", "is_final"), [(Reason.CANCELED, True), (Reason.PREEMPTED, False)])
def test_an_allocation_that_ends_in_the_queue_refuses_the_lease(bench: Bench, reason: Reason, is_final: bool) -> None:
    bench.engine.grants_at_once = False
    bench.backend.lease(bench.request("a"))
    bench.await_one(LeaseWaits)
    bench.engine.end("1", Over(reason=reason, message="canceled by root"))
    refused = bench.await_one(LeaseRefused)
    assert (refused.is_final, refused.reason, [*refused.nodes.values()]) == (is_final, reason, ["canceled by root"])
    if not is_final:
        bench.engine.grants_at_once = True
        bench.backend.lease(bench.request("a"))
        assert bench.await_one(Leased).binding.tasks["a"].node == "h0@2"


def test_the_request_of_a_gang_that_no_longer_waits_is_withdrawn(bench: Bench) -> None:
    bench.engine.grants_at_once = False
    bench.backend.lease(bench.request("a"))
    bench.backend.lease(bench.request("a", workflow=W2))
    bench.await_one(LeaseWaits, workflow=W1)
    bench.await_one(LeaseWaits, workflow=W2)
    bench.backend.keep([AttemptKey(workflow=W2, group="g", task="", attempt=0, node="")])
    wait_until(
        lambda: [one.workflow for one in bench.engine.allocations().values()] == [W2], what="only one allocation is left"
    )


def test_the_next_supervisor_finds_its_allocations_and_releases_those_of_ended_workflows(bench: Bench) -> None:
    (key,) = bench.lease("a")
    pid = bench.start(key, "echo one; sleep 600")
    bench.lease("a", workflow=W2)
    bench.backend.close()
    bench.observations.clear()
    folder = Path(bench.pool.template.root).parent  # type: ignore[union-attr]
    later = Bench(folder, bench.engine)
    later.backend.watch([key])
    later.backend.keep([AttemptKey(workflow=W1, group="g", task="", attempt=0, node="")], ended=[W2])
    assert later.await_one(Started, key=key).pid == pid
    wait_until(lambda: bench.engine.released == ["2"], what="the leftover allocation is released")
    later.backend.lease(later.request("a"))
    assert later.await_one(Leased).binding.tasks["a"].node == key.node
    later.backend.stop(key, grace_s=0.0, why="test")
    assert later.await_one(Ended, key=key).end["reason"] == "stopped"
    later.backend.keep(())
    later.backend.close()
    assert bench.engine.released == ["2", "1"]
