"""The contract of backends (``backends.base.Backend``): in memory, on this machine, and on nodes of a real Slurm or Ray.

A `Bench` is a backend with two GPUs. A test reads its nodes from the lease, because engines choose them.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import pytest

from contract.test_runtime_faults import kill_together
from distflow.backends import steady
from distflow.backends.allocated.backend import open_backend
from distflow.backends.allocated.engine import QueryLimit
from distflow.backends.allocated.slurm.slurm_engine import SlurmEngine
from distflow.backends.base import (
    Absent,
    AttemptKey,
    Backend,
    Collected,
    CollectFailed,
    Collecting,
    CollectUnanswered,
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
    PrepareFailed,
    Released,
    Staging,
    Started,
    StopAccepted,
    Unanswered,
)
from distflow.backends.machines.backend import MachinesBackend
from distflow.backends.machines.cleanup import unknown_workflows_of_node
from distflow.backends.machines.connection.link import AgentLink
from distflow.backends.machines.connection.transfers import Fetched, fetch_output, send_blobs
from distflow.backends.machines.leasing import GangLease
from distflow.errors import AgentError, NodeUnreachable
from distflow.lifecycle.clocks import Clock
from distflow.plan.credentials import TaskSecrets
from distflow.plan.model import BoundLaunch, PlannedFile
from distflow.pools.model import KubernetesSettings, Node, Pool, RaySettings, SlurmSettings
from distflow.protocol.names import Operation
from distflow.runtime.files.root_directory import PRIVATE
from distflow.structs import replace
from distflow.testing.backend import Behavior, FakeBackend
from distflow.testing.kubernetes import IMAGE, KubernetesCluster, pod_template
from distflow.testing.nodes import write_skewed_python
from distflow.testing.ray import RayCluster
from distflow.testing.slurm import Slurm, missing_slurm
from distflow.testing.waiting import wait_until
from distflow.transports.base import Transport

BEHIND_S = 1000.0
_ROUNDED_S = 2e-6

T = TypeVar("T", bound=Observation)


W1, W2 = "1" * 32, "2" * 32
"""UUIDs of two workflows."""


@dataclass
class Bench:
    """A backend under test, and its observations."""

    backend: Backend
    nodes: tuple[Node, ...] = ()
    """The nodes of its pool; empty if an engine allocates them."""
    tick: Callable[[], object] = lambda: None
    observations: list[Observation] = field(default_factory=list)
    logs: dict[tuple[str, str], bytes] = field(default_factory=dict)
    beats: list[tuple[str, float]] = field(default_factory=list)
    _leases: dict[str, Leased] = field(default_factory=dict)

    @property
    def node(self) -> Node:
        """The only node of its pool."""
        (node,) = self.nodes
        return node

    def connect(self) -> None:
        """Connect to the nodes of its pool."""
        self.backend.connect(self.nodes)
        for node in self.nodes:
            self.await_one(NodeUp, node=node.name)

    def take(self, observation: Observation) -> None:
        """Record an observation."""
        self.observations.append(observation)
        if isinstance(observation, Leased):
            self._leases[observation.workflow] = observation

    def resume_position(self, key: AttemptKey, kind: str) -> tuple[str, int]:
        return f"output.{kind}", len(self.logs.get((key.name, f"output.{kind}"), b""))

    def has_room(self) -> bool:
        return True

    def write(self, key: AttemptKey, file: str, offset: int, data: bytes) -> None:
        held = self.logs.get((key.name, file), b"")
        assert offset <= len(held), "a gap in the log"
        self.logs[key.name, file] = held[:offset] + data

    def record_heartbeat(self, key: AttemptKey, at: float) -> None:
        self.beats.append((key.name, at))

    def await_one(self, kind: type[T], **match: Any) -> T:
        def find() -> T | None:
            self.tick()
            for one in self.observations:
                if isinstance(one, kind) and all(getattr(one, name) == value for name, value in match.items()):
                    return one
            return None

        return wait_until(find, 120, f"{kind.__name__} {match}")  # an engine may have to start pods or actors first

    def key(self, task: str = "t", attempt: int = 0, workflow: str = W1) -> AttemptKey:
        """The key of an attempt, on its own node or on another one of its gang."""
        leased = self._leases.get(workflow)
        if leased is None:
            return AttemptKey(workflow=workflow, group="g", task=task, attempt=attempt, node=self.node.name)
        tasks = leased.binding.tasks
        node = tasks[task].node if task in tasks else next(iter(tasks.values())).node
        return AttemptKey(workflow=workflow, group="g", task=task, attempt=attempt, node=node)

    def keep(self, *workflows: str) -> None:
        """Return the leases of all other workflows."""
        self.backend.keep([AttemptKey(workflow=one, group="g", task="", attempt=0, node="") for one in workflows])

    def request(self, *tasks: str, gpus: int = 0, workflow: str = W1, port: int | str | None = "any") -> LeaseRequest:
        return LeaseRequest(
            workflow=workflow, group="g", attempt=0, nodes=dict.fromkeys(tasks, self.node.name if self.nodes else ""),
            gpus=dict.fromkeys(tasks, gpus), master=tasks[0], port=port, start_timeout_s=30,
        )  # fmt: skip

    def lease(self, *tasks: str, gpus: int = 0, workflow: str = W1) -> Leased:
        """Lease a gang."""
        self.backend.lease(self.request(*tasks, gpus=gpus, workflow=workflow))
        return self.await_one(Leased, workflow=workflow)

    def await_denial(self, workflow: str) -> str:
        """Wait until a gang is refused for now or must wait, and return the reason."""

        def find() -> str:
            self.tick()
            for one in self.observations:
                if isinstance(one, LeaseRefused) and one.workflow == workflow:
                    assert not one.is_final
                    return "; ".join(one.nodes.values())
                if isinstance(one, LeaseWaits) and one.workflow == workflow:
                    return one.message
            return ""

        return wait_until(find, 120, "the gang does not get its nodes")

    def launch(self, script: str, task: str = "t") -> BoundLaunch:
        return BoundLaunch(task=task, node=self.key(task).node, argv=("sh", "-c", script), environment={"A": "b c"})

    def begin(self, script: str, task: str = "t") -> AttemptKey:
        """Lease, prepare and start one attempt."""
        self.lease(task)
        key = self.key(task)
        self.backend.prepare(key, self.launch(script, task), TaskSecrets(), 5.0)
        self.await_one(Prepared, key=key)
        self.backend.start(key)
        self.await_one(Started, key=key)
        return key


def _node(folder: Path) -> Node:
    return Node(
        name="local", host="localhost", address="127.0.0.1", root=str(folder / "node"), python=sys.executable, gpus=2,
        lease_dir=str(folder / "leases"), check_capacity=False,
    )  # fmt: skip


def _bench(*nodes: Node) -> Bench:
    return Bench(backend=None, nodes=nodes)  # type: ignore[arg-type]


def _fake(folder: Path, *, behind_s: float = 0.0) -> Bench:
    bench = _bench(_node(folder))
    pool = Pool(name="p", backend="local", nodes=bench.nodes)

    def behave(key: AttemptKey) -> Behavior:
        if key.task in ("long", "stubborn"):
            return Behavior(seconds=float("inf"), obeys_term=key.task == "long")
        return Behavior(seconds=0.1, exit_code=3, output=b"out\nerr\n")

    clocks = {"local": Clock(offset_s=-behind_s, uncertainty_s=0.0)}
    fake = FakeBackend(pool, now=steady.now, sink=bench.take, logs=bench, behavior=behave, clocks=clocks)
    bench.backend, bench.tick = fake, fake.tick
    return bench


def _machines(folder: Path, *, behind_s: float = 0.0, **settings: Any) -> Bench:
    node = replace(_node(folder), python=_python(folder, behind_s))
    pool = Pool(name="p", backend="local", nodes=(node,), **settings)
    bench = _bench(node)
    (folder / "blobs").mkdir()
    bench.backend = MachinesBackend(pool, blobs=folder / "blobs", sink=bench.take, logs=bench)
    return bench


def _python(folder: Path, behind_s: float) -> str:
    if not behind_s:
        return sys.executable
    corrected_s = time.time() - steady.now()  # noqa: TID251 - a time server may have moved it since this process started
    return write_skewed_python(folder / "python", -behind_s - corrected_s)


@pytest.fixture(scope="module")
def slurm_with_two_gpus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    """Two nodes with one GPU each."""
    if why := missing_slurm():
        pytest.skip(why)
    with Slurm(tmp_path_factory.mktemp("slurm"), gpus=1) as made:
        yield made


@pytest.fixture
def on_slurm(slurm_with_two_gpus: Slurm, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Bench]]:
    """A function that returns a bench whose nodes a real Slurm allocates. Its jobs end with the test."""
    monkeypatch.setenv("SLURM_CONF", str(slurm_with_two_gpus.config))
    monkeypatch.setattr(SlurmEngine, "query_limit", QueryLimit(at_once=4.0, every_s=0.1))

    def make(folder: Path, *, behind_s: float = 0.0) -> Bench:
        node = replace(_node(folder), name="", host="", gpus=None, python=_python(folder, behind_s))
        pool = Pool(name="p", backend="slurm", nodes=(), template=node, slurm=SlurmSettings(idle_release_s=30.0))
        bench = _bench()
        (folder / "blobs").mkdir()
        bench.backend = open_backend(pool, blobs=folder / "blobs", sink=bench.take, logs=bench)
        return bench

    yield make
    slurm_with_two_gpus.cancel_jobs()


@pytest.fixture
def on_ray(ray: RayCluster) -> Iterator[Callable[..., Bench]]:
    """A function that returns a bench whose nodes a real Ray cluster allocates. One GPU of each of its two nodes is free."""
    ray.run("ray.util.placement_group([{'GPU': 1}] * 2, strategy='STRICT_SPREAD', name='reserved').wait(30)")

    def make(folder: Path, *, behind_s: float = 0.0) -> Bench:
        node = replace(_node(folder), name="", host="", gpus=None, python=_python(folder, behind_s))
        settings = RaySettings(address=ray.address, python=ray.python, idle_release_s=30.0)
        pool = Pool(name="p", backend="ray", nodes=(), template=node, ray=settings)
        bench = _bench()
        (folder / "blobs").mkdir()
        bench.backend = open_backend(pool, blobs=folder / "blobs", sink=bench.take, logs=bench)
        return bench

    yield make
    ray.run("ray.util.remove_placement_group(ray.util.get_placement_group('reserved'))")


@pytest.fixture
def on_kubernetes(kubernetes: KubernetesCluster) -> Iterator[Callable[..., Bench]]:
    """A function that returns a bench whose nodes are pods of a real Kubernetes. They end with the test."""
    if not kubernetes.is_own:
        pytest.skip("pods of a foreign cluster do not run on this machine")
    namespace = kubernetes.create_namespace()
    gpu = f"example.com/{namespace}"  # for this test alone, because others use the cluster at the same time
    kubernetes.add_resource(gpu, 1)

    def make(folder: Path, *, behind_s: float = 0.0) -> Bench:
        node = replace(_node(folder), name="", host="", gpus=1, address=None, python=_python(folder, behind_s))
        settings = KubernetesSettings(
            kubeconfig=str(kubernetes.kubeconfig), namespace=namespace, image=IMAGE, idle_release_s=30.0,
            gpu_resource=gpu, pod_template=json.dumps(pod_template(str(folder))),
        )  # fmt: skip
        pool = Pool(name="p", backend="kubernetes", nodes=(), template=node, kubernetes=settings)
        bench = _bench()
        (folder / "blobs").mkdir()
        bench.backend = open_backend(pool, blobs=folder / "blobs", sink=bench.take, logs=bench)
        return bench

    yield make
    kubernetes.delete_namespace(namespace)


ENGINES = [pytest.param(name, marks=pytest.mark.slow) for name in ("slurm", "ray", "kubernetes")]
BENCHES: dict[str, Callable[..., Bench]] = {"fake": _fake, "local": _machines}
"""Functions by name that return a bench. ``on_slurm``, ``on_ray`` and ``on_kubernetes`` return further functions."""


def _maker(request: pytest.FixtureRequest) -> Callable[..., Bench]:
    made: Callable[..., Bench] = BENCHES.get(request.param) or request.getfixturevalue(f"on_{request.param}")
    return made


@pytest.fixture(params=[*BENCHES, *ENGINES])
def bench(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Bench]:
    yield from _connected(_maker(request)(tmp_path))


@pytest.fixture(params=[*BENCHES, *ENGINES])
def skewed_bench(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Bench]:
    """A bench whose nodes' clocks are behind this machine's clock."""
    yield from _connected(_maker(request)(tmp_path, behind_s=BEHIND_S))


def _connected(made: Bench) -> Iterator[Bench]:
    made.connect()
    yield made
    made.keep()
    made.backend.close()
    made.backend.close()


def test_lease_and_release_do_not_block_and_an_unknown_attempt_is_absent(bench: Bench) -> None:
    begin = time.monotonic()
    bench.backend.lease(bench.request("t"))
    assert time.monotonic() - begin < 30
    bench.await_one(Leased)
    unknown = bench.key("unknown")
    bench.backend.watch([unknown])
    bench.await_one(Absent, key=unknown)
    bench.backend.collect(unknown)
    assert "no longer exists" in bench.await_one(CollectFailed, key=unknown).message
    begin = time.monotonic()
    bench.backend.release(bench.key("t"))
    assert time.monotonic() - begin < 30


def test_an_attempt_is_reported_in_order_with_all_of_its_output_and_its_nodes_clock(skewed_bench: Bench) -> None:
    bench = skewed_bench
    before = steady.now()
    key = bench.begin("echo out; echo err >&2; exit 3")
    ended = bench.await_one(Ended, key=key)
    assert (ended.end["exit_code"], ended.end["reason"]) == (3, "exited")
    bench.await_one(LogComplete, key=key)
    assert bench.logs[key.name, "output.log"] == b"out\nerr\n"
    kinds = [type(one) for one in bench.observations if getattr(one, "key", None) == key]
    assert kinds.index(Prepared) < kinds.index(Started) < kinds.index(Ended) < kinds.index(LogComplete)
    started = bench.await_one(Started, key=key)
    for observation, reported_at in ((started, started.started_at), (ended, ended.end["ended_at"])):
        clock = observation.clock
        assert clock is not None
        assert abs(clock.offset_s + BEHIND_S) <= clock.uncertainty_s + _ROUNDED_S
        assert isinstance(reported_at, float)
        assert reported_at < before - BEHIND_S / 2, "the time is not that of the node's clock"
        uncertainty_s = clock.uncertainty_s + _ROUNDED_S
        assert before - uncertainty_s <= clock.ours(reported_at) <= observation.at + uncertainty_s


def test_a_late_watcher_gets_the_start_of_an_ended_attempt_and_its_output_is_collected(bench: Bench) -> None:
    key = bench.begin('echo out; echo model > "$DISTFLOW_OUTPUT/model"; exit 3')
    bench.await_one(LogComplete, key=key)
    first = bench.await_one(Started, key=key)
    bench.observations.clear()
    bench.backend.watch([key])
    bench.await_one(Ended, key=key)
    second = bench.await_one(Started, key=key)
    assert bench.observations.index(second) < bench.observations.index(bench.await_one(Ended, key=key))
    assert (second.started_at, second.pid, second.directory) == (first.started_at, first.pid, first.directory)
    bench.backend.collect(key)
    collected = bench.await_one(Collected, key=key)
    assert len(collected.digest) == 64
    assert collected.size > 0
    bench.observations.clear()
    bench.backend.collect(key)
    assert bench.await_one(Collected, key=key).digest == collected.digest


@pytest.mark.parametrize("bench", ["local"], indirect=True)
def test_an_attempt_with_a_complete_report_is_no_longer_polled(bench: Bench) -> None:
    backend = bench.backend
    assert isinstance(backend, MachinesBackend)
    key = bench.begin("echo out")
    bench.await_one(LogComplete, key=key)
    connection = backend._connections["local"]
    wait_until(lambda: not (connection._watched or connection._tailed or connection._drained), 20)
    # The same end is reported again when it is watched again.
    bench.observations.clear()
    backend.watch([key])
    assert bench.await_one(Ended, key=key).end["exit_code"] == 0
    bench.await_one(LogComplete, key=key)


def test_the_start_of_an_attempt_of_an_unknown_workflow_is_in_local_time(tmp_path: Path) -> None:
    for bench in _connected(_machines(tmp_path, behind_s=BEHIND_S)):
        begun = steady.now()
        bench.begin("sleep 0.1")
        pool = Pool(name="p", backend="local", nodes=(bench.node,))
        (found,) = unknown_workflows_of_node(pool, bench.node, known=()).workflows
        started_at = found.attempts[0].started_at
        assert started_at is not None
        assert abs(started_at - begun) < BEHIND_S / 2


def test_start_watch_and_stop_can_be_repeated(bench: Bench) -> None:
    key = bench.begin("sleep 600", "long")
    started = bench.await_one(Started, key=key).started_at
    bench.observations.clear()
    bench.backend.start(key)
    bench.backend.watch([key])
    bench.backend.stop(key, grace_s=5, why="test")
    bench.await_one(StopAccepted, key=key)
    bench.backend.stop(key, grace_s=5, why="test")
    end = bench.await_one(Ended, key=key).end
    assert end["reason"] == "stopped"
    assert end["started_at"] == started


def _gpus(leased: Leased) -> list[tuple[str, int]]:
    """The GPUs of a gang, each with its node."""
    return sorted((one.node, gpu) for one in leased.binding.tasks.values() for gpu in one.gpu_ids)


def test_a_gang_gets_all_of_its_gpus_or_none_and_a_refused_gang_frees_its_gpus_at_once(bench: Bench) -> None:
    bench.lease("other", gpus=1, workflow=W2)
    for _ in range(10 if bench.nodes else 1):  # on an engine, each iteration is another allocation, which takes seconds
        bench.observations.clear()
        bench.backend.lease(bench.request("a", "b", gpus=1))
        assert "has its nodes" not in bench.await_denial(W1)
        bench.keep(W2)
        assert len(_gpus(bench.lease("a", gpus=1))) == 1
        key = bench.key("a")
        bench.backend.prepare(key, bench.launch("true", "a"), TaskSecrets(), 5.0)
        bench.await_one(Prepared, key=key)
        bench.backend.release(key)
        bench.await_one(Released, key=key)
        bench.keep(W2)
    # A refused gang gets all of its GPUs when they are free.
    bench.observations.clear()
    bench.backend.lease(bench.request("a", "b", gpus=1))
    bench.await_denial(W1)
    bench.backend.release(bench.key("other", workflow=W2))
    bench.await_one(Released, key=bench.key("other", workflow=W2))
    bench.keep(W1)
    bench.observations.clear()
    granted = bench.lease("a", "b", gpus=1)
    assert len(set(_gpus(granted))) == 2
    assert isinstance(granted.binding.port, int)
    for task in ("a", "b"):
        bench.backend.release(bench.key(task))
        bench.await_one(Released, key=bench.key(task))


def test_a_second_stop_can_shorten_the_grace_period(bench: Bench) -> None:
    key = bench.begin("trap '' TERM; sleep 600", "stubborn")
    bench.backend.stop(key, grace_s=600.0, why="test")
    bench.await_one(StopAccepted, key=key, grace_s=600.0)
    bench.backend.stop(key, grace_s=0.0, why="test")
    bench.await_one(Ended, key=key)


def test_an_output_that_is_being_collected_is_not_collected_twice(tmp_path: Path) -> None:
    bench = _machines(tmp_path)
    bench.connect()
    output = tmp_path / "node" / PRIVATE / bench.key().name / "output"
    output.mkdir(parents=True)
    with (output / "big").open("wb") as file:
        file.truncate(64 << 20)
    for _ in range(3):
        bench.backend.collect(bench.key())
    found = bench.await_one(Collected, key=bench.key())
    assert (tmp_path / "blobs" / found.digest).stat().st_size == found.size > 64 << 20
    bench.backend.close()
    assert [type(one) for one in bench.observations if getattr(one, "key", None) == bench.key()].count(Collected) == 1


def test_an_output_in_the_queue_is_not_collected_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The output is requested again when its node reconnects, which may be before its turn."""
    monkeypatch.setattr("distflow.backends.machines.backend._COLLECT_THREADS", 1)
    fetched: list[str] = []
    may_end = threading.Event()

    def fetch(transport: object, root: str, python: str, attempt: str, *_: object, **__: object) -> Fetched:
        may_end.wait(30)
        fetched.append(attempt)
        return Fetched(digest="0" * 64, size=0, files=0, left_out=())

    monkeypatch.setattr("distflow.backends.machines.connection.node_connection.fetch_output", fetch)
    bench = _machines(tmp_path)
    bench.connect()
    try:
        for task in ("first", "second", "second", "last"):
            bench.backend.collect(bench.key(task))
        may_end.set()
        bench.await_one(Collected, key=bench.key("last"))
    finally:
        may_end.set()
        bench.backend.close()
    assert fetched == [bench.key(task).name for task in ("first", "second", "last")]


def test_a_local_directory_that_cannot_store_an_output_is_named(tmp_path: Path) -> None:
    bench = _machines(tmp_path)
    bench.connect()
    (tmp_path / "node" / PRIVATE / bench.key().name / "output").mkdir(parents=True)
    (tmp_path / "blobs").rmdir()
    (tmp_path / "blobs").touch()
    bench.backend.collect(bench.key())
    message = bench.await_one(CollectFailed, key=bench.key()).message
    assert message == f"it cannot be stored in {tmp_path / 'blobs'} on the machine of the supervisor: File exists"
    bench.backend.close()


def test_closing_a_backend_aborts_running_transfers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[str] = []

    def endless(*_: object, progress: Callable[[bool, int, int], None], **__: object) -> None:
        try:
            while True:
                progress(False, 0, 1)
                pause.wait(0.01)
        except NodeUnreachable as error:
            ended.append(error.detail)
            raise

    pause = threading.Event()
    monkeypatch.setattr("distflow.backends.machines.connection.node_connection.fetch_output", endless)
    bench = _machines(tmp_path)
    bench.connect()
    bench.backend.collect(bench.key())
    assert bench.await_one(Collecting).is_packed is False
    bench.backend.close()
    wait_until(lambda: ended == ["the supervisor is closing its connections"], 20)


def test_slow_collections_do_not_delay_a_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    is_over = threading.Event()

    def slow(*_: object, progress: Callable[[bool, int, int], None], **__: object) -> None:
        while not is_over.wait(0.01):
            progress(False, 0, 1)
        raise NodeUnreachable("local", "it ended")

    monkeypatch.setattr("distflow.backends.machines.connection.node_connection.fetch_output", slow)
    bench = _machines(tmp_path)
    bench.connect()
    try:
        for number in range(100):
            bench.backend.collect(bench.key(f"earlier{number}"))
        bench.await_one(Collecting)
        bench.await_one(Ended, key=bench.begin("exit 0"))
    finally:
        is_over.set()
        bench.backend.close()


def test_collecting_is_given_up_after_five_lost_connections(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("distflow.backends.machines.outputs._PAUSE_S", 0.0)

    def fail(*_: object, **__: object) -> None:
        raise NodeUnreachable("local", "it ended")

    monkeypatch.setattr("distflow.backends.machines.connection.node_connection.fetch_output", fail)
    bench = _machines(tmp_path, node_lost_after_s=0.0)
    bench.connect()
    for number in range(1, 6):
        bench.backend.collect(bench.key())
        wait_until(lambda number=number: len(_observations_of_attempt(bench)) == number, 20)  # type: ignore[misc]
    assert [type(one) for one in _observations_of_attempt(bench)] == [CollectUnanswered] * 4 + [CollectFailed]
    assert "the connection ended 5 times: it ended" in bench.await_one(CollectFailed).message
    bench.backend.close()


@pytest.mark.parametrize("op", ["start", "stop", "release"])
def test_an_answer_that_arrives_after_its_node_was_dropped_is_handled(
    op: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The nodes of an allocation are dropped when it ends, perhaps while a request to one of them is answered."""
    bench = _machines(tmp_path)
    bench.connect()
    backend: Any = bench.backend
    send = backend._send

    def send_and_drop(key: AttemptKey, op: Operation, answered: Callable[..., None], **fields: object) -> None:
        def drop_first(*answer: object) -> None:
            backend.drop([key.node])
            answered(*answer)

        send(key, op, drop_first, **fields)

    monkeypatch.setattr(backend, "_send", send_and_drop)
    if op == "start":
        bench.backend.start(bench.key())
    elif op == "stop":
        bench.backend.stop(bench.key(), grace_s=0.0, why="test")
    else:
        bench.backend.release(bench.key())
    wait_until(lambda: len(_observations_of_attempt(bench)) > 0, 20)
    bench.backend.close()


def test_collecting_is_repeated_until_the_node_counts_as_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An sshd that is being restarted refuses new connections, while the agent's connection continues."""
    monkeypatch.setattr("distflow.backends.machines.outputs._PAUSE_S", 0.0)
    tries: list[int] = []

    def fetch(transport: Transport, root: str, python: str, attempt: str, blobs: Path, **options: Any) -> Fetched:
        if blobs != tmp_path / "blobs":  # a remaining thread of an earlier test
            return fetch_output(transport, root, python, attempt, blobs, **options)
        tries.append(1)
        if len(tries) < 20:
            raise NodeUnreachable("local", "connection refused")
        return Fetched(digest="0" * 64, size=0, files=0, left_out=())

    monkeypatch.setattr("distflow.backends.machines.connection.node_connection.fetch_output", fetch)
    bench = _machines(tmp_path)
    bench.connect()
    for number in range(1, 21):
        bench.backend.collect(bench.key())
        wait_until(lambda number=number: len(_observations_of_attempt(bench)) == number, 20)  # type: ignore[misc]
    assert [type(one) for one in _observations_of_attempt(bench)] == [CollectUnanswered] * 19 + [Collected]
    bench.backend.close()


def test_an_unexpected_error_while_an_output_is_collected_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> Fetched:
        raise RuntimeError("bad frame")

    with monkeypatch.context() as patched:
        patched.setattr("distflow.backends.machines.connection.node_connection.fetch_output", fail)
        bench = _machines(tmp_path)
        bench.backend.connect([bench.node])
        bench.await_one(NodeUp)
        bench.backend.collect(bench.key())
        message = bench.await_one(CollectFailed, key=bench.key()).message
        assert message.startswith(
            "it cannot be fetched: a bug in distflow, please report it: RuntimeError('bad frame'); the traceback"
        )
    # The same output can be collected afterwards.
    (tmp_path / "node" / PRIVATE / bench.key().name / "output").mkdir(parents=True)
    bench.backend.collect(bench.key())
    bench.await_one(Collected, key=bench.key())
    bench.backend.close()


def test_an_unexpected_error_while_an_attempt_is_prepared_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = _machines(tmp_path)
    bench.connect()
    bench.lease("t")

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("bad launch")

    monkeypatch.setattr("distflow.backends.machines.connection.node_connection.path_prepend", fail)
    bench.backend.prepare(bench.key(), bench.launch("true"), TaskSecrets(), 5.0)
    message = bench.await_one(PrepareFailed, key=bench.key()).message
    assert message.startswith("a bug in distflow, please report it: RuntimeError('bad launch'); the traceback is in")
    bench.backend.release(bench.key())
    bench.await_one(Released, key=bench.key())
    bench.backend.close()


@pytest.mark.parametrize(
    "answer",
    [
        {"gpu_ids": 7}, {"gpu_ids": ["0"]}, {"gpu_ids": [], "port": "http"}, {"port": 70000},
        AgentError("n", "malformed", "the answer to `lease` is malformed"),
    ],
)  # fmt: skip
def test_a_lease_with_a_malformed_answer_is_refused(answer: dict[str, Any] | AgentError) -> None:
    observations: list[Observation] = []

    class AnsweringNode:
        node = Node(name="n", host="n", root="/r", python="python3")
        gpu_ids = (0, 1)
        granted_gpus = None
        amounts = MappingProxyType({"cpus": 4})

        def __init__(self) -> None:
            self.released: list[AttemptKey] = []

        def send(self, _op: str, answered: Callable[[object], None], **_: object) -> None:
            answered(answer)

        def release_lease(self, key: AttemptKey, waits: object) -> None:
            assert waits is None
            self.released.append(key)

    request = LeaseRequest(workflow="w", group="g", attempt=0, nodes={"t": "n"}, gpus={"t": 1}, master="t")
    node = AnsweringNode()
    GangLease(request, {"n": node}, observations.append).begin()  # type: ignore[dict-item]
    (refused,) = observations
    assert isinstance(refused, LeaseRefused)
    assert refused.is_final
    assert node.released == [request.key("t")]


def test_a_node_that_was_allocated_with_too_few_gpus_refuses() -> None:
    observations: list[Observation] = []

    class SmallNode:
        node = Node(name="n", host="n", root="/r", python="python3")
        granted_gpus = (0, 1)

    request = LeaseRequest(workflow="w", group="g", attempt=0, nodes={"t": "n"}, gpus={"t": 4}, master="t")
    GangLease(request, {"n": SmallNode()}, observations.append).begin()  # type: ignore[dict-item]
    (refused,) = observations
    assert isinstance(refused, LeaseRefused)
    assert "it was allocated with 2 GPUs, and the task needs 4" in str(refused)


def _observations_of_attempt(bench: Bench) -> list[Observation]:
    return [one for one in bench.observations if getattr(one, "key", None) == bench.key()]


@pytest.mark.parametrize("is_second_try", [False, True])
def test_a_stop_cancels_the_upload_of_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_second_try: bool) -> None:
    """It also cancels the second try, which begins as soon as the connection of the first one has ended."""
    bench = _machines(tmp_path)
    data = os.urandom(1 << 20)
    blob = PlannedFile(path="work/blob", shown="blob", blob=hashlib.sha256(data * 64).hexdigest(), size=len(data) * 64)
    # A pipe in place of the blob: the test controls how fast it is sent.
    os.mkfifo(tmp_path / "blobs" / str(blob.blob))
    bench.connect()
    key = bench.key()
    bench.lease("t")

    def prepare() -> None:
        bench.backend.prepare(key, replace(bench.launch("true"), files=(blob,)), TaskSecrets(), 5.0)

    def break_off(*_: object, **__: object) -> None:
        monkeypatch.setattr("distflow.backends.machines.connection.node_connection.send_blobs", send_blobs)
        raise NodeUnreachable("local", "it ended")

    def take(observation: Observation) -> None:
        bench.observations.append(observation)
        if isinstance(observation, Unanswered):
            prepare()

    monkeypatch.setattr(bench.backend, "_sink", take)
    if is_second_try:
        monkeypatch.setattr("distflow.backends.machines.connection.node_connection.send_blobs", break_off)
    prepare()
    with (tmp_path / "blobs" / str(blob.blob)).open("wb") as pipe:

        def send_until_reported() -> Staging | None:
            pipe.write(data[: 128 << 10])
            pipe.flush()
            # On a busy machine, the first report comes before the first byte.
            return next((one for one in bench.observations if isinstance(one, Staging) and one.sent > 0), None)

        staging = wait_until(send_until_reported, 30)
        assert staging.sent < staging.total == blob.size
        bench.backend.stop(key, grace_s=1, why="test")
        bench.await_one(Ended, key=key)
        with pytest.raises(BrokenPipeError):  # noqa: PT012  the sender reads a few times more
            for _ in range(32):  # half of the blob, because a complete upload would close the pipe, too
                pipe.write(data)
                pipe.flush()
    assert not [one for one in bench.observations if isinstance(one, Prepared)]
    bench.backend.close()


def test_a_lease_whose_answer_was_lost_is_returned_after_the_reconnect(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = _machines(tmp_path)
    take = AgentLink._take

    def discard_answer(link: AgentLink, message: dict[str, Any]) -> None:
        if "gpu_ids" not in message:
            take(link, message)

    monkeypatch.setattr(AgentLink, "_take", discard_answer)
    bench.connect()
    bench.backend.lease(bench.request("t"))
    record = tmp_path / "node" / PRIVATE / bench.key("t").name / "runner.json"
    wait_until(record.exists, 20)
    wait_until(lambda: len(_agents(tmp_path)) == 1, 20, "the agent's children have other names")
    os.kill(_agents(tmp_path)[0], signal.SIGKILL)
    assert not bench.await_one(LeaseRefused).is_final
    wait_until(lambda: not record.exists(), 20, "the lease is free")
    bench.backend.close()


def test_a_silent_node_is_reported_although_the_ping_interval_is_long(tmp_path: Path) -> None:
    """The interval of heartbeats follows ``node_lost_after``, however long ``ping`` is."""
    bench = _machines(tmp_path, ping_s=60.0, node_lost_after_s=3.0)
    bench.connect()
    wait_until(lambda: len(_agents(tmp_path)) == 1, 20)
    (agent,) = _agents(tmp_path)
    os.kill(agent, signal.SIGSTOP)
    try:
        down = bench.await_one(NodeDown)
    finally:
        os.kill(agent, signal.SIGKILL)
    assert "no heartbeat for" in down.error
    assert down.since is not None
    assert down.since < down.at
    bench.backend.close()


def test_a_node_with_a_malformed_first_answer_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    take = AgentLink._take

    def take_malformed(link: AgentLink, message: dict[str, Any]) -> None:
        take(link, message | {"facts": {"gpus": "many"}} if "facts" in message else message)

    bench = _machines(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(AgentLink, "_take", take_malformed)
        bench.backend.connect([bench.node])
        assert "the answer to `hello` is malformed" in bench.await_one(NodeDown).error
    bench.await_one(NodeUp)
    bench.backend.close()


def test_nodes_with_one_lease_directory_are_known_as_one_machine(tmp_path: Path) -> None:
    bench = _machines(tmp_path)
    (tmp_path / "link").symlink_to(tmp_path / "leases")
    twin = replace(bench.node, name="twin", root=str(tmp_path / "twin"), lease_dir=str(tmp_path / "link"))
    apart = replace(bench.node, name="apart", root=str(tmp_path / "apart"), lease_dir=str(tmp_path / "others"))
    bench.backend.connect([bench.node])
    first = bench.await_one(NodeUp, node="local").lease_directory_id
    bench.backend.connect([twin, apart])
    assert first
    assert bench.await_one(NodeUp, node="twin").lease_directory_id == first
    assert bench.await_one(NodeUp, node="apart").lease_directory_id not in ("", first)
    bench.backend.close()


STALE_FILE_SYSTEM = """\
import os
real = os.statvfs
def stale(path):
    if not os.path.exists({repaired!r}):
        raise OSError(116, "Stale file handle", path)
    return real(path)
os.statvfs = stale
"""


def test_failed_hello_requests_leave_no_agents_on_the_node(tmp_path: Path) -> None:
    """A node does this while its file system does not answer. Each try is a new connection."""
    repaired, wrapper = tmp_path / "repaired", tmp_path / "python"
    (tmp_path / "prefix.py").write_text(STALE_FILE_SYSTEM.format(repaired=str(repaired)))
    words = f'shift 3\nstub=$1\nshift\nexec {sys.executable} -I -S -c "$(cat {tmp_path}/prefix.py)\n$stub" "$@"\n'
    wrapper.write_text("#!/bin/sh\n" + words)
    wrapper.chmod(0o755)
    bench = _machines(tmp_path)
    bench.backend.connect([replace(bench.node, python=str(wrapper))])
    try:
        wait_until(lambda: sum(isinstance(one, NodeDown) for one in bench.observations) > 2, 30, "three tries")
        assert "Stale file handle" in bench.await_one(NodeDown).error
        repaired.touch()
        bench.await_one(NodeUp)
        wait_until(lambda: len(_agents(tmp_path)) == 1, 10, "one agent is left")
    finally:
        bench.backend.close()


def test_a_start_that_crosses_the_end_of_its_lease_is_not_a_start_failure(tmp_path: Path) -> None:
    """Nothing has run, so the gang must be queued again, as if its supervisor had received the end before the start."""
    bench = _machines(tmp_path)
    key = bench.key()
    bench.backend.connect([bench.node])
    try:
        bench.await_one(NodeUp)
        bench.backend.lease(bench.request("t"))
        bench.await_one(Leased)
        bench.backend.prepare(key, bench.launch("true"), TaskSecrets(), 5.0)
        bench.await_one(Prepared)
        kill_together(json.loads((tmp_path / "node" / PRIVATE / key.name / "runner.json").read_text()))
        assert bench.await_one(Ended).end["reason"] == "both_died"
        bench.backend.start(key)
        bench.backend.prepare(key, bench.launch("true"), TaskSecrets(), 5.0)
        wait_until(lambda: not bench.backend._halts, 20, "the request is answered")  # type: ignore[attr-defined]
        bench.backend.stop(key, grace_s=0, why="")
        bench.await_one(StopAccepted)
        assert not [one for one in bench.observations if isinstance(one, PrepareFailed)]
    finally:
        bench.backend.close()


def _agents(folder: Path) -> list[int]:
    return [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if _is_agent(pid, folder)]


def _is_agent(pid: int, folder: Path) -> bool:
    try:
        name, words = Path(f"/proc/{pid}/comm").read_text(), Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
    return name == "df-agent\n" and os.fsencode(folder) in words


def test_a_released_attempt_may_be_leased_and_sent_its_files_again(tmp_path: Path) -> None:
    bench = _machines(tmp_path)
    data = os.urandom(100_000)
    blob = PlannedFile(path="work/blob", shown="blob", blob=hashlib.sha256(data).hexdigest(), size=len(data))
    (tmp_path / "blobs" / str(blob.blob)).write_bytes(data)
    bench.connect()
    key = bench.key()
    for _ in range(2):
        bench.observations.clear()
        bench.backend.lease(bench.request("t"))
        bench.await_one(Leased)
        bench.backend.prepare(key, replace(bench.launch("true"), files=(blob,)), TaskSecrets(), 5.0)
        bench.await_one(Prepared, key=key)
        bench.backend.release(key)
        bench.await_one(Released, key=key)
        # Otherwise, the blob would not have to be sent again.
        (tmp_path / "node" / PRIVATE / "blobs" / str(blob.blob)).unlink()
    bench.backend.close()
