"""Transports to allocated nodes for commands of users: nodes of a pool share one engine, and may outlive their allocation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import pytest

from distflow.backends.allocated.engine import Allocation, AllocationRequest, NodeRequest, Over, RequestRefused
from distflow.backends.allocated.nodes import Engines
from distflow.errors import NodeUnreachable
from distflow.pools.model import Pool, ssh_node
from distflow.testing.local_engine import LocalEngine
from distflow.transports.base import Transport
from distflow.transports.local import LocalTransport


class CountingEngine(LocalEngine):
    """An engine that counts how often its login node is used and how often it is closed."""

    def __init__(self) -> None:
        super().__init__()
        self.logins = self.closed = 0

    def login_transport(self) -> Transport:
        self.logins += 1
        return super().login_transport()

    def close(self) -> None:
        self.closed += 1


@pytest.fixture
def pool() -> Pool:
    return Pool(name="p", backend="slurm", nodes=(), template=ssh_node())


def request_two_nodes(engine: LocalEngine) -> str:
    allocation = Allocation(workflow="1" * 32, group="g", attempt=0)
    nodes = (NodeRequest(task="a"), NodeRequest(task="b"))
    return engine.request(AllocationRequest(allocation=allocation, label="w/g", nodes=nodes))


def test_all_nodes_of_a_pool_share_an_engine_until_the_last_is_closed(pool: Pool) -> None:
    opened: list[CountingEngine] = []

    def open_engine(_: Pool) -> CountingEngine:
        opened.append(CountingEngine())
        return opened[-1]

    engines = Engines(open_engine)
    first, second = engines.transport(pool, "h0@1"), engines.transport(pool, "h1@1")
    first.close()
    first.close()
    assert (len(opened), opened[0].closed) == (1, 0)
    with pytest.raises(NodeUnreachable, match="closed"):
        first.run(["true"], timeout_s=60)
    second.close()
    assert opened[0].closed == 1
    engines.transport(pool, "h0@1").close()
    assert (len(opened), opened[1].closed) == (2, 1)


def test_operations_go_to_the_login_node_after_the_end_of_the_allocation(pool: Pool) -> None:
    engine = CountingEngine()
    name = request_two_nodes(engine)
    transport = Engines(lambda _: engine).transport(pool, f"h0@{name}")
    assert transport.run(["echo", "inside"], timeout_s=60).stdout == b"inside\n"
    assert engine.logins == 0
    engine.end(name, Over(reason=None, message="it has ended"))
    transport.hang_up()  # a connection broke, because the allocation ended
    assert transport.run(["echo", "outside"], timeout_s=60).stdout == b"outside\n"
    assert engine.logins == 1
    engine.is_away = True
    transport.hang_up()
    with pytest.raises(NodeUnreachable, match="does not answer"):
        transport.open(["true"])
    transport.close()


class UnusableEngine(CountingEngine):
    """A cluster whose kubeconfig cannot be used."""

    def allocations(self) -> Mapping[str, Allocation]:
        raise RequestRefused("the kubeconfig cannot be used", hint="check it")


def test_an_unusable_configuration_is_an_error_of_the_node(pool: Pool) -> None:
    transport = Engines(lambda _: UnusableEngine()).transport(pool, "h0@1")
    for use in (lambda: transport.run(["true"], timeout_s=60), lambda: transport.open(["true"])):
        with pytest.raises(NodeUnreachable, match="the kubeconfig cannot be used") as caught:
            use()
        assert (caught.value.node, caught.value.hint) == ("h0@1", "check it")
    transport.close()


class ExpiringEngine(CountingEngine):
    """An engine whose allocations end when a command starts there."""

    def transport(self, allocation_id: str, host: str) -> Transport:
        def end() -> None:
            self.end(allocation_id, Over(reason=None, message="it has ended"))

        return ExpiringTransport(host, end)


class ExpiringTransport(LocalTransport):
    def __init__(self, name: str, end: Callable[[], None]) -> None:
        super().__init__(name)
        self._end = end

    def open(self, argv: Sequence[str]) -> ClosedChannel:  # type: ignore[override]
        self._end()
        return ClosedChannel()


class ClosedChannel:
    """The channel of a relay that did not start: `srun: error: Slurm job 5 has expired`."""

    exit_code = None

    def write(self, data: bytes) -> None:
        raise NodeUnreachable("h0", f"{len(data)} bytes are lost")

    def read(self) -> bytes:
        return b""

    def stderr_tail(self) -> str:
        return "has expired"

    def close(self) -> None:
        pass


def test_a_command_runs_on_the_login_node_when_its_allocation_ends_before_the_start(pool: Pool) -> None:
    engine = ExpiringEngine()
    name = request_two_nodes(engine)
    transport = Engines(lambda _: engine).transport(pool, f"h0@{name}")
    channel = transport.open(["sh", "-c", "echo ready; cat"])
    assert channel.read() == b"ready\n"
    channel.write(b"more")
    assert channel.read() == b"more"
    channel.close()
    transport.close()
