"""Races: requests and changes that reach an attempt in the middle of a step.

Each test chooses the moment: it holds a real process at that step, or does there what another process may do at this moment.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
import uuid
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from contract.conftest import LOCAL_TRANSPORT, launch_of
from contract.test_runtime_faults import kill_together
from distflow.backends.base import AttemptKey, Ended, Leased, LeaseRefused, LeaseRequest, NodeUp, Prepared, Started
from distflow.backends.machines.connection.bootstrap import connect
from distflow.backends.machines.connection.link import AgentLink
from distflow.backends.machines.connection.node_connection import NodeConnection
from distflow.backends.machines.leasing import GangLease
from distflow.pools.model import Node, Pool
from distflow.protocol.names import Operation
from distflow.runtime.agent import server
from distflow.runtime.cleanup import orphans, reaping
from distflow.runtime.files import attempts, records
from distflow.runtime.files.root_directory import PRIVATE
from distflow.runtime.guard import runner
from distflow.runtime.leases import node_leases
from distflow.testing.waiting import is_alive, wait_until
from distflow.transports.local import LocalTransport

if TYPE_CHECKING:
    from contract.conftest import NodeUnderTest

pytestmark = LOCAL_TRANSPORT

UMASK = 0o22


class StartingPair:
    """A real runner and keeper whose agent is gone. They write their first state when ``resume`` is called."""

    def __init__(self, node: NodeUnderTest, monkeypatch: pytest.MonkeyPatch) -> None:
        self._gate = node.root / "gate"
        first_state = records.first_state

        def first_state_after_resume(*arguments: Any) -> Any:
            self._gate.read_bytes()  # a FIFO: this blocks until it is opened for writing
            return first_state(*arguments)

        monkeypatch.setattr(records, "first_state", first_state_after_resume)
        os.mkfifo(self._gate)
        self.attempt = node.attempt()
        request = {"attempt": self.attempt, "gpus": 1, "gpu_ids": [0], "lease_dir": str(node.lease_dir), "start_timeout_s": 60}
        self._runner: int | None = attempts.create(str(node.root), request, UMASK)

    def resume(self) -> None:
        """Let the pair write its first state."""
        self._gate.write_bytes(b"")

    def await_end(self) -> None:
        """Wait until no process of the pair is left, even if the test failed."""
        with contextlib.suppress(OSError):  # no process waits at the gate
            os.close(os.open(self._gate, os.O_WRONLY | os.O_NONBLOCK))
        if self._runner is not None:
            os.waitpid(self._runner, 0)
            self._runner = None


@pytest.fixture
def starting_pair(node: NodeUnderTest, monkeypatch: pytest.MonkeyPatch) -> Iterator[StartingPair]:
    node.connect().close()  # creates the root
    made = StartingPair(node, monkeypatch)
    yield made
    link = node.connect()
    link.send("release", lambda _answer: None, attempt=made.attempt)
    link.request("ping")
    made.await_end()


def is_unlocked(directory: Path) -> bool:
    try:
        os.close(attempts.lock_task(str(directory), wait=False))
    except attempts.TaskIsLocked:
        return False
    return True


def gpu_can_be_leased(node: NodeUnderTest) -> bool:
    """Lease and release the GPU. This raises an error if it is in use."""
    link = node.connect()
    link.request("release", attempt=node.lease(link, gpus=1, gpu_ids=[0]))
    return True


def test_a_lease_can_be_released_while_its_pair_starts(node: NodeUnderTest, starting_pair: StartingPair) -> None:
    link = node.connect()
    answers: list[Any] = []
    link.send("release", answers.append, attempt=starting_pair.attempt)
    link.request("ping")
    starting_pair.resume()
    wait_until(lambda: answers, 20, "the answer to the release")
    assert answers == [{}]
    assert not Path(node.root, starting_pair.attempt).exists()
    assert gpu_can_be_leased(node)


@pytest.mark.parametrize("step", ["makedirs", "lock_task"])
def test_an_attempt_can_be_leased_while_an_earlier_one_of_its_task_is_released(
    node: NodeUnderTest, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    link = node.connect()
    link.request("ping")
    earlier = node.attempt()
    module = os if step == "makedirs" else attempts
    original = getattr(module, step)

    def call_and_release_earlier(*given: Any, **named: Any) -> Any:
        monkeypatch.setattr(module, step, original)
        result = original(*given, **named)
        attempts.remove(str(node.directory(earlier)))
        return result

    monkeypatch.setattr(module, step, call_and_release_earlier)
    attempt = earlier[:-1] + "1"
    runner = attempts.create(str(node.root), {"attempt": attempt, "start_timeout_s": 60}, UMASK)
    assert node.watch(link, attempt)["phase"] in ("absent", "leased")
    link.request("release", attempt=attempt)
    os.waitpid(runner, 0)
    assert not (node.root / node.workflow).exists()


def test_a_pair_that_starts_during_a_release_is_released(
    node: NodeUnderTest, starting_pair: StartingPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = node.root / "sent"
    child = os.fork()  # an agent kills the processes that it has adopted
    if child == 0:
        agent, read = server._Agent(str(node.root), os.pipe()[0], os.pipe()[1], UMASK), attempts.read_status

        def send(message: Any, bulk: bool = False) -> None:
            sent.write_text(json.dumps(message))
            os._exit(0)

        def read_and_start_pair(directory: str) -> Any:
            status = read(directory)
            monkeypatch.setattr(attempts, "read_status", read)
            starting_pair.resume()
            wait_until(lambda: read(directory)["phase"] == "leased")
            return status

        with contextlib.suppress(BaseException):
            monkeypatch.setattr(agent, "send", send)
            monkeypatch.setattr(attempts, "read_status", read_and_start_pair)
            agent._loop.later(20, lambda: os._exit(1))
            agent._dispatch({"id": 1, "op": "release", "attempt": starting_pair.attempt})
            agent.run()
        os._exit(2)
    assert os.waitpid(child, 0)[1] == 0
    assert json.loads(sent.read_text()) == {"id": 1, "ok": True}
    assert gpu_can_be_leased(node)


def test_a_lease_that_another_connection_is_making_is_reported_as_locked(
    node: NodeUnderTest, starting_pair: StartingPair
) -> None:
    """The requester should read the status again, and will then find the attempt."""
    request = {"attempt": starting_pair.attempt, "gpus": 1, "gpu_ids": [0], "lease_dir": str(node.lease_dir)}
    # The task is locked until its runner has closed the lock file.
    wait_until(lambda: is_unlocked(node.directory(starting_pair.attempt)), 20, "the lock of the task")
    with pytest.raises(attempts.TaskIsLocked):
        attempts.create(str(node.root), request, UMASK)
    starting_pair.resume()


class Logs:
    """Discard the output."""

    def resume_position(self, key: AttemptKey, kind: str) -> tuple[str, int]:
        return f"output.{kind}", 0

    def has_room(self) -> bool:
        return True

    def write(self, key: AttemptKey, file: str, offset: int, data: bytes) -> None:
        pass

    def record_heartbeat(self, key: AttemptKey, at: float) -> None:
        pass


def test_a_lease_that_is_canceled_while_its_node_reconnects_is_released(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The node's connection had broken. While it reconnects, another node of the gang refuses."""
    lease_dir = str(tmp_path / "leases")
    node = Node(name="here", host="here", root=str(tmp_path / "root"), python=sys.executable, lease_dir=lease_dir)
    pool = Pool(name="lab", backend="local", nodes=(node,))
    key = AttemptKey(workflow=str(uuid.uuid4()), group="g", task="t", attempt=0, node="here")
    lease: dict[str, Any] = {"gpus": 1, "gpu_ids": [0], "lease_dir": lease_dir, "port": None, "start_timeout_s": 60}
    with closing(connect(LocalTransport("here"), node.root, node.python)) as link:
        link.request("lease", attempt=key.name, **lease)
    directory = tmp_path / "root" / PRIVATE / key.name
    assert directory.exists()
    connection = NodeConnection(pool, node, LocalTransport("here"), lambda _: None, Logs())
    request = AgentLink.request

    def request_and_release(link: AgentLink, op: Operation, **fields: Any) -> Any:
        then = fields.pop("then", lambda _: None)

        def take(answer: Any) -> None:
            if op == "hello":
                connection.release_lease(key)
            then(answer)

        return request(link, op, then=take, **fields)

    monkeypatch.setattr(AgentLink, "request", request_and_release)
    connection.begin()
    try:
        wait_until(lambda: not directory.exists(), 20, "the release of the lease")
    finally:
        connection.close()
        with closing(connect(LocalTransport("here"), node.root, node.python)) as link:
            link.request("release", attempt=key.name)


def test_sigterm_to_a_runner_whose_keeper_has_just_died_does_not_lose_the_record(
    node: NodeUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shutdown of the node, or a user who ends all processes of distflow, sends SIGTERM to both."""
    link = node.connect()
    link.request("ping")
    waitpid = os.waitpid

    def wait_and_terminate(pid: int, options: int) -> tuple[int, int]:
        found = waitpid(pid, options)
        if os.getpid() == runner_pid[0] and pid > 0:
            os.kill(os.getpid(), signal.SIGTERM)
        return found

    runner_pid = [0]
    guard = runner._guard

    def record_pid_and_guard(*given: Any) -> None:
        runner_pid[0] = os.getpid()
        guard(*given)

    monkeypatch.setattr(os, "waitpid", wait_and_terminate)
    monkeypatch.setattr(runner, "_guard", record_pid_and_guard)
    attempt = node.attempt()
    pid = attempts.create(str(node.root), {"attempt": attempt, "start_timeout_s": 60}, UMASK)
    try:
        wait_until(lambda: records.read_state(str(node.directory(attempt))), 20, "the start of the keeper")
        os.kill(node.state(attempt)["keeper"]["pid"], signal.SIGKILL)
    finally:
        status = waitpid(pid, 0)[1]
    assert os.waitstatus_to_exitcode(status) == 0
    assert (node.record(attempt) or {})["reason"] == "keeper_died"


def test_events_right_after_hello_stay_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer and the next event arrive together, and two threads of the submitter handle them."""
    lease_dir = str(tmp_path / "leases")
    node = Node(name="here", host="here", root=str(tmp_path / "root"), python=sys.executable, lease_dir=lease_dir)
    pool = Pool(name="lab", backend="local", nodes=(node,))
    key = AttemptKey(workflow=str(uuid.uuid4()), group="g", task="t", attempt=0, node="here")
    lease: dict[str, Any] = {"gpus": 0, "gpu_ids": [], "lease_dir": lease_dir, "port": None, "start_timeout_s": 60}
    observations: list[Any] = []
    connection = NodeConnection(pool, node, LocalTransport("here"), observations.append, Logs())
    request = AgentLink.request
    with closing(connect(LocalTransport("here"), node.root, node.python)) as link:
        link.request("lease", attempt=key.name, **lease)
        link.request("prepare", attempt=key.name, launch=launch_of(["sleep", "60"]))

        def request_and_start(own: AgentLink, op: Operation, **fields: Any) -> Any:
            answer = request(own, op, **fields)
            if op == "hello":
                request(link, "start", attempt=key.name)
                wait_until(lambda: any(isinstance(one, Started) for one in observations), 20, "the event")
            return answer

        monkeypatch.setattr(AgentLink, "request", request_and_start)
        connection.watch(key)
        connection.begin()
        try:
            wait_until(lambda: any(isinstance(one, NodeUp) for one in observations), 20)
            wait_until(lambda: any(isinstance(one, Started) for one in observations), 20)
            kinds = [type(one) for one in observations if isinstance(one, (Prepared, Started))]
            assert kinds == [Prepared, Started]
            assert connection._streams
        finally:
            request(link, "stop", attempt=key.name, grace_s=0, why="")
            connection.close()


def test_an_attempt_that_ends_while_leftovers_are_searched_is_not_unsettled(
    node: NodeUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = node.connect()
    attempt = node.start(link, ["sleep", "60"])
    pair = [node.state(attempt)[role]["pid"] for role in ("runner", "keeper")]
    is_guarded = orphans.is_guarded
    stops: list[Any] = []

    def end_and_check(directory: str) -> bool:
        if not stops:
            stops.append(link.request("stop", attempt=attempt, grace_s=0, why=""))
            wait_until(lambda: not any(map(is_alive, pair)), 20, "the end of runner and keeper")
        return is_guarded(directory)

    monkeypatch.setattr(orphans, "is_guarded", end_and_check)
    leftovers = reaping._Leftovers(str(node.root))
    assert leftovers.unsettled() == []
    assert stops


def test_a_lease_with_an_unreachable_pair_can_be_released(node: NodeUnderTest) -> None:
    link = node.connect()
    attempt = node.lease(link, gpus=1, gpu_ids=[0])
    link.close()
    (node.directory(attempt) / "control").unlink()
    node.connect().request("release", attempt=attempt)
    assert not node.directory(attempt).exists()
    assert gpu_can_be_leased(node)


def test_the_end_of_a_lease_is_reported_after_the_lease(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pair is killed before the lease of the gang is reported. An end before that could not be attributed."""
    lease_dir = str(tmp_path / "leases")
    nodes = tuple(
        Node(name=name, host=name, root=str(tmp_path / name), python=sys.executable, lease_dir=lease_dir) for name in "ab"
    )
    pool = Pool(name="lab", backend="local", nodes=nodes)
    request = LeaseRequest(
        workflow=str(uuid.uuid4()), group="g", attempt=0, nodes={"t": "a", "u": "b"}, gpus={}, master="t", port=None,
        start_timeout_s=60,
    )  # fmt: skip
    key, observations = request.key("t"), []
    answered = GangLease._answered

    def answer_in_order(gang: GangLease, task: str, answer: Any) -> None:
        if task == "u":
            wait_until(lambda: "t" in gang._answers, 20, "the answer for the other task")
        answered(gang, task, answer)

    def take(one: Any) -> None:
        if isinstance(one, Leased):
            kill_together(json.loads((tmp_path / "a" / PRIVATE / key.name / "runner.json").read_text()))
            wait_until(lambda: has_ended() or key.name not in connections["a"]._watched, 20, "the report of the end")
        observations.append(one)

    def has_ended() -> bool:
        return any(isinstance(one, Ended) for one in observations)

    monkeypatch.setattr(GangLease, "_answered", answer_in_order)
    connections = {one.name: NodeConnection(pool, one, LocalTransport(one.name), take, Logs()) for one in nodes}
    try:
        for connection in connections.values():
            connection.begin()
        wait_until(lambda: sum(isinstance(one, NodeUp) for one in observations) == 2, 20)
        GangLease(request, connections, take).begin()
        wait_until(has_ended, 20, "the end")
        assert [type(one) for one in observations if isinstance(one, (Leased, Ended))] == [Leased, Ended]
        connections["b"].request("release", attempt=request.key("u").name)
    finally:
        for connection in connections.values():
            connection.close()


def test_a_gang_of_two_nodes_comes_before_short_gangs_that_would_fill_one_of_them(tmp_path: Path) -> None:
    """Two roots share a node's CPUs. The gang waits for its other node; meanwhile no later request gets this node."""
    lease_dirs = {"a": str(tmp_path / "leases-a"), "b": str(tmp_path / "leases-b")}
    nodes = tuple(
        Node(
            name=name,
            host=name,
            root=str(tmp_path / name),
            python=sys.executable,
            lease_dir=lease_dirs.get(name, lease_dirs["a"]),
            cpus=1,
        )
        for name in ("a", "b", "a of another")
    )
    pool = Pool(name="lab", backend="local", nodes=nodes)
    observations: list[Any] = []

    def request(tasks: dict[str, str]) -> LeaseRequest:
        return LeaseRequest(
            workflow=str(uuid.uuid4()), group="g", attempt=0, nodes=tasks, gpus={}, cpus=dict.fromkeys(tasks, 1), master="t",
            port=None, start_timeout_s=60,
        )  # fmt: skip

    def request_lease(lease_request: LeaseRequest) -> Leased | LeaseRefused:
        def answers() -> list[Leased | LeaseRefused]:
            return [
                one
                for one in observations
                if isinstance(one, (Leased, LeaseRefused)) and one.workflow == lease_request.workflow
            ]

        before = len(answers())
        GangLease(lease_request, connections, observations.append).begin()
        wait_until(lambda: len(answers()) > before, 20, "the answer")
        return answers()[-1]

    gang, short = request({"t": "a", "u": "b"}), request({"t": "a of another"})
    other = {"user": "another", "attempt": f"{uuid.uuid4()}/g/t/0", "pid": 1}
    held = node_leases.take(lease_dirs["b"], 0, [], None, other, {"cpus": (1, 1)})
    connections = {one.name: NodeConnection(pool, one, LocalTransport(one.name), observations.append, Logs()) for one in nodes}
    try:
        for connection in connections.values():
            connection.begin()
        wait_until(lambda: sum(isinstance(one, NodeUp) for one in observations) == 3, 20)
        assert isinstance(request_lease(gang), LeaseRefused)
        # The short gang uses another agent on this node. Its request must not arrive before the ticket exists.
        wait_until(lambda: list(Path(lease_dirs["a"]).glob("ticket-*.json")), 20, "the ticket of the gang")

        def refusal() -> str:
            answer = request_lease(short)
            assert isinstance(answer, LeaseRefused), "the short gang got its lease first"
            return answer.nodes["a of another"]

        wait_until(lambda: "1 CPU is kept for" in refusal(), 20, "the reserved CPU")
        held.close()
        assert isinstance(request_lease(gang), Leased)
    finally:
        for task in gang.nodes:
            connections[gang.nodes[task]].request("release", attempt=gang.key(task).name)
        for connection in connections.values():
            connection.close()


def test_a_connection_that_is_closed_just_before_it_connects_does_not_connect(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = Node(name="just-closed", host="here", root=str(tmp_path / "root"), python=sys.executable)
    pool = Pool(name="lab", backend="local", nodes=(node,))
    observations: list[Any] = []
    connection = NodeConnection(pool, node, LocalTransport("here"), observations.append, Logs())
    clear = connection._broken.clear

    def close_and_clear() -> None:
        connection.close()
        clear()

    monkeypatch.setattr(connection._broken, "clear", close_and_clear)
    connection.begin()
    try:
        wait_until(lambda: all(one.name != "node just-closed" for one in threading.enumerate()), 20, "the end of its thread")
        assert not observations
    finally:
        connection._broken.set()
