"""What comes just then: requests and files that meet an attempt in the middle of a step.

Each test chooses the moment: it holds a real process at that step, or does in it what another process may do then.
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

from contract.conftest import launch_of
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

UMASK = 0o22


class ComingUp:
    """A real pair that was just forked, by an agent that is gone: it says its first word when it is let go."""

    def __init__(self, node: NodeUnderTest, monkeypatch: pytest.MonkeyPatch) -> None:
        self._gate = node.root / "gate"
        first_state = records.first_state

        def held(*given: Any) -> Any:
            self._gate.read_bytes()  # a FIFO: until somebody opens it for writing
            return first_state(*given)

        monkeypatch.setattr(records, "first_state", held)
        os.mkfifo(self._gate)
        self.attempt = node.attempt()
        request = {"attempt": self.attempt, "gpus": 1, "gpu_ids": [0], "lease_dir": str(node.lease_dir), "start_timeout_s": 60}
        self._runner: int | None = attempts.create(str(node.root), request, UMASK)

    def go_on(self) -> None:
        """Let it speak."""
        self._gate.write_bytes(b"")

    def await_end(self) -> None:
        """Wait until no process of it is left, even if the test failed."""
        with contextlib.suppress(OSError):  # no process waits at the gate
            os.close(os.open(self._gate, os.O_WRONLY | os.O_NONBLOCK))
        if self._runner is not None:
            os.waitpid(self._runner, 0)
            self._runner = None


@pytest.fixture
def coming_up(node: NodeUnderTest, monkeypatch: pytest.MonkeyPatch) -> Iterator[ComingUp]:
    node.connect().close()  # makes the root
    made = ComingUp(node, monkeypatch)
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


def lease_is_free(node: NodeUnderTest) -> bool:
    link = node.connect()
    link.request("release", attempt=node.lease(link, gpus=1, gpu_ids=[0]))
    return True


def test_a_lease_whose_pair_is_starting_is_returned(node: NodeUnderTest, coming_up: ComingUp) -> None:
    link = node.connect()
    answers: list[Any] = []
    link.send("release", answers.append, attempt=coming_up.attempt)
    link.request("ping")
    coming_up.go_on()
    wait_until(lambda: answers, 20, "the answer to the release")
    assert answers == [{}]
    assert not Path(node.root, coming_up.attempt).exists()
    assert lease_is_free(node)


@pytest.mark.parametrize("step", ["makedirs", "lock_task"])
def test_a_lease_may_come_while_another_one_of_its_task_is_given_back(
    node: NodeUnderTest, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    link = node.connect()
    link.request("ping")
    before = node.attempt()
    where = os if step == "makedirs" else attempts
    taken = getattr(where, step)

    def and_then_one_is_given_back(*given: Any, **named: Any) -> Any:
        monkeypatch.setattr(where, step, taken)
        result = taken(*given, **named)
        attempts.remove(str(node.directory(before)))
        return result

    monkeypatch.setattr(where, step, and_then_one_is_given_back)
    attempt = before[:-1] + "1"
    runner = attempts.create(str(node.root), {"attempt": attempt, "start_timeout_s": 60}, UMASK)
    assert node.watch(link, attempt)["phase"] in ("absent", "leased")
    link.request("release", attempt=attempt)
    os.waitpid(runner, 0)
    assert not (node.root / node.workflow).exists()


def test_a_pair_that_comes_up_during_a_release_is_released(
    node: NodeUnderTest, coming_up: ComingUp, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = node.root / "sent"
    child = os.fork()  # an agent kills the processes that it has adopted
    if child == 0:
        agent, read = server._Agent(str(node.root), os.pipe()[0], os.pipe()[1], UMASK), attempts.read_status

        def send(message: Any, bulk: bool = False) -> None:
            sent.write_text(json.dumps(message))
            os._exit(0)

        def and_then_it_comes_up(directory: str) -> Any:
            status = read(directory)
            monkeypatch.setattr(attempts, "read_status", read)
            coming_up.go_on()
            wait_until(lambda: read(directory)["phase"] == "leased")
            return status

        with contextlib.suppress(BaseException):
            monkeypatch.setattr(agent, "send", send)
            monkeypatch.setattr(attempts, "read_status", and_then_it_comes_up)
            agent._loop.later(20, lambda: os._exit(1))
            agent._dispatch({"id": 1, "op": "release", "attempt": coming_up.attempt})
            agent.run()
        os._exit(2)
    assert os.waitpid(child, 0)[1] == 0
    assert json.loads(sent.read_text()) == {"id": 1, "ok": True}
    assert lease_is_free(node)


def test_a_lease_just_made_on_another_connection_is_not_a_conflict(node: NodeUnderTest, coming_up: ComingUp) -> None:
    """The requester has seen nothing yet, and is asked to check again, which then finds the task."""
    request = {"attempt": coming_up.attempt, "gpus": 1, "gpu_ids": [0], "lease_dir": str(node.lease_dir)}
    # Until its runner has closed what it need not hold, the task is locked, and the report says so.
    wait_until(lambda: is_unlocked(node.directory(coming_up.attempt)), 20, "the maker to let go of the task")
    with pytest.raises(attempts.TaskIsLocked):
        attempts.create(str(node.root), request, UMASK)
    coming_up.go_on()


class Logs:
    """Discard the output."""

    def reached(self, key: AttemptKey, kind: str) -> tuple[str, int]:
        return f"output.{kind}", 0

    def has_room(self) -> bool:
        return True

    def write(self, key: AttemptKey, file: str, offset: int, data: bytes) -> None:
        pass

    def beat(self, key: AttemptKey, at: float) -> None:
        pass


def test_a_lease_canceled_while_its_node_says_hello_is_returned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its connection had broken; another node of the gang refuses while the next one is being made."""
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

    def asked(link: AgentLink, op: Operation, **fields: Any) -> Any:
        then = fields.pop("then", lambda _: None)

        def take(answer: Any) -> None:
            if op == "hello":
                connection.release_lease(key)
            then(answer)

        return request(link, op, then=take, **fields)

    monkeypatch.setattr(AgentLink, "request", asked)
    connection.begin()
    try:
        wait_until(lambda: not directory.exists(), 20, "the lease to be given back")
    finally:
        connection.close()
        with closing(connect(LocalTransport("here"), node.root, node.python)) as link:
            link.request("release", attempt=key.name)


def test_sigterm_to_a_runner_whose_keeper_has_just_died_costs_no_record(
    node: NodeUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As both get it that a node's shutdown, or somebody who ends all that is distflow's, finds there."""
    link = node.connect()
    link.request("ping")
    waitpid = os.waitpid

    def terminated(pid: int, options: int) -> tuple[int, int]:
        found = waitpid(pid, options)
        if os.getpid() == runners[0] and pid > 0:
            os.kill(os.getpid(), signal.SIGTERM)
        return found

    runners = [0]
    guard = runner._guard

    def guarded(*given: Any) -> None:
        runners[0] = os.getpid()
        guard(*given)

    monkeypatch.setattr(os, "waitpid", terminated)
    monkeypatch.setattr(runner, "_guard", guarded)
    attempt = node.attempt()
    pid = attempts.create(str(node.root), {"attempt": attempt, "start_timeout_s": 60}, UMASK)
    try:
        wait_until(lambda: records.read_state(str(node.directory(attempt))), 20, "the keeper to come up")
        os.kill(node.state(attempt)["keeper"]["pid"], signal.SIGKILL)
    finally:
        status = waitpid(pid, 0)[1]
    assert os.waitstatus_to_exitcode(status) == 0
    assert (node.record(attempt) or {})["reason"] == "keeper_died"


def test_events_right_after_hello_stay_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer and the next event come in one piece, and two threads of ours take them."""
    lease_dir = str(tmp_path / "leases")
    node = Node(name="here", host="here", root=str(tmp_path / "root"), python=sys.executable, lease_dir=lease_dir)
    pool = Pool(name="lab", backend="local", nodes=(node,))
    key = AttemptKey(workflow=str(uuid.uuid4()), group="g", task="t", attempt=0, node="here")
    lease: dict[str, Any] = {"gpus": 0, "gpu_ids": [], "lease_dir": lease_dir, "port": None, "start_timeout_s": 60}
    seen: list[Any] = []
    connection = NodeConnection(pool, node, LocalTransport("here"), seen.append, Logs())
    request = AgentLink.request
    with closing(connect(LocalTransport("here"), node.root, node.python)) as link:
        link.request("lease", attempt=key.name, **lease)
        link.request("prepare", attempt=key.name, launch=launch_of(["sleep", "60"]))

        def asked(own: AgentLink, op: Operation, **fields: Any) -> Any:
            answer = request(own, op, **fields)
            if op == "hello":
                request(link, "start", attempt=key.name)
                wait_until(lambda: any(isinstance(one, Started) for one in seen), 20, "the event")
            return answer

        monkeypatch.setattr(AgentLink, "request", asked)
        connection.watch(key)
        connection.begin()
        try:
            wait_until(lambda: any(isinstance(one, NodeUp) for one in seen), 20)
            wait_until(lambda: any(isinstance(one, Started) for one in seen), 20)
            kinds = [type(one) for one in seen if isinstance(one, (Prepared, Started))]
            assert kinds == [Prepared, Started]
            assert connection._streams
        finally:
            request(link, "stop", attempt=key.name, grace_s=0, why="")
            connection.close()


def test_an_attempt_that_ends_while_it_is_looked_at_is_not_called_settled(
    node: NodeUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = node.connect()
    attempt = node.start(link, ["sleep", "60"])
    pair = [node.state(attempt)[who]["pid"] for who in ("runner", "keeper")]
    is_watched = orphans.is_watched
    stops: list[Any] = []

    def and_then_it_has_ended(directory: str) -> bool:
        if not stops:
            stops.append(link.request("stop", attempt=attempt, grace_s=0, why=""))
            wait_until(lambda: not any(map(is_alive, pair)), 20, "its pair to leave")
        return is_watched(directory)

    monkeypatch.setattr(orphans, "is_watched", and_then_it_has_ended)
    scene = reaping._Leftovers(str(node.root))
    assert scene.unsettled() == []
    assert stops


def test_a_lease_with_an_unreachable_pair_is_returned_anyway(node: NodeUnderTest) -> None:
    link = node.connect()
    attempt = node.lease(link, gpus=1, gpu_ids=[0])
    link.close()
    (node.directory(attempt) / "control").unlink()
    node.connect().request("release", attempt=attempt)
    assert not node.directory(attempt).exists()
    assert lease_is_free(node)


def test_the_end_of_a_lease_is_reported_after_the_lease(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its pair is killed before the gang is known to have its nodes; before that, the end cannot be attributed."""
    lease_dir = str(tmp_path / "leases")
    nodes = tuple(
        Node(name=name, host=name, root=str(tmp_path / name), python=sys.executable, lease_dir=lease_dir) for name in "ab"
    )
    pool = Pool(name="lab", backend="local", nodes=nodes)
    request = LeaseRequest(
        workflow=str(uuid.uuid4()), group="g", attempt=0, nodes={"t": "a", "u": "b"}, gpus={}, master="t", port=None,
        start_timeout_s=60,
    )  # fmt: skip
    key, seen = request.key("t"), []
    answered = GangLease._answered

    def in_turn(gang: GangLease, task: str, answer: Any) -> None:
        if task == "u":
            wait_until(lambda: "t" in gang._answers, 20, "the answer for the other task")
        answered(gang, task, answer)

    def take(one: Any) -> None:
        if isinstance(one, Leased):
            kill_together(json.loads((tmp_path / "a" / PRIVATE / key.name / "runner.json").read_text()))
            wait_until(lambda: has_ended() or key.name not in connections["a"]._watched, 20, "the end, where it is reported")
        seen.append(one)

    def has_ended() -> bool:
        return any(isinstance(one, Ended) for one in seen)

    monkeypatch.setattr(GangLease, "_answered", in_turn)
    connections = {one.name: NodeConnection(pool, one, LocalTransport(one.name), take, Logs()) for one in nodes}
    try:
        for connection in connections.values():
            connection.begin()
        wait_until(lambda: sum(isinstance(one, NodeUp) for one in seen) == 2, 20)
        GangLease(request, connections, take).begin()
        wait_until(has_ended, 20, "the end")
        assert [type(one) for one in seen if isinstance(one, (Leased, Ended))] == [Leased, Ended]
        connections["b"].request("release", attempt=request.key("u").name)
    finally:
        for connection in connections.values():
            connection.close()


def test_a_gang_of_two_nodes_comes_before_short_gangs_that_would_fill_one_of_them(tmp_path: Path) -> None:
    """Two roots share a node's CPUs. The gang's other node is taken; meanwhile no later request gets this one."""
    hold = {"a": str(tmp_path / "leases-a"), "b": str(tmp_path / "leases-b")}
    nodes = tuple(
        Node(
            name=name, host=name, root=str(tmp_path / name), python=sys.executable, lease_dir=hold.get(name, hold["a"]), cpus=1
        )
        for name in ("a", "b", "a of another")
    )
    pool = Pool(name="lab", backend="local", nodes=nodes)
    seen: list[Any] = []

    def request(tasks: dict[str, str]) -> LeaseRequest:
        return LeaseRequest(
            workflow=str(uuid.uuid4()), group="g", attempt=0, nodes=tasks, gpus={}, cpus=dict.fromkeys(tasks, 1), master="t",
            port=None, start_timeout_s=60,
        )  # fmt: skip

    def ask(what: LeaseRequest) -> Leased | LeaseRefused:
        def answers() -> list[Leased | LeaseRefused]:
            return [one for one in seen if isinstance(one, (Leased, LeaseRefused)) and one.workflow == what.workflow]

        before = len(answers())
        GangLease(what, connections, seen.append).begin()
        wait_until(lambda: len(answers()) > before, 20, "the answer")
        return answers()[-1]

    gang, short = request({"t": "a", "u": "b"}), request({"t": "a of another"})
    other = {"user": "another", "attempt": f"{uuid.uuid4()}/g/t/0", "pid": 1}
    taken = node_leases.take(hold["b"], 0, [], None, other, {"cpus": (1, 1)})
    connections = {one.name: NodeConnection(pool, one, LocalTransport(one.name), seen.append, Logs()) for one in nodes}
    try:
        for connection in connections.values():
            connection.begin()
        wait_until(lambda: sum(isinstance(one, NodeUp) for one in seen) == 3, 20)
        assert isinstance(ask(gang), LeaseRefused)
        # Its node has another agent: a gang that asks that agent earlier has waited longer.
        wait_until(lambda: list(Path(hold["a"]).glob("ticket-*.json")), 20, "the place of the gang in the queue")

        def refusal() -> str:
            answer = ask(short)
            assert isinstance(answer, LeaseRefused), "it overtook"
            return answer.nodes["a of another"]

        wait_until(lambda: "1 CPU is kept for" in refusal(), 20, "the place that is kept")
        taken.close()
        assert isinstance(ask(gang), Leased)
    finally:
        for task in gang.nodes:
            connections[gang.nodes[task]].request("release", attempt=gang.key(task).name)
        for connection in connections.values():
            connection.close()


def test_a_connection_that_is_closed_when_it_is_just_to_be_made_is_not_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = Node(name="just-closed", host="here", root=str(tmp_path / "root"), python=sys.executable)
    pool = Pool(name="lab", backend="local", nodes=(node,))
    seen: list[Any] = []
    connection = NodeConnection(pool, node, LocalTransport("here"), seen.append, Logs())
    clear = connection._broken.clear

    def closed_by_then() -> None:
        connection.close()
        clear()

    monkeypatch.setattr(connection._broken, "clear", closed_by_then)
    connection.begin()
    try:
        wait_until(lambda: all(one.name != "node just-closed" for one in threading.enumerate()), 20, "its thread to end")
        assert not seen
    finally:
        connection._broken.set()
