"""A small all-reduce between the nodes of a pool: whether torch can use the training network, and its speed.

It runs one process on each node, over gloo and the interface that gangs would use. It measures the network and uses no GPU.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from distflow.backends.machines.checks.finding import Finding, error, few, warning
from distflow.backends.machines.checks.measured import Measured
from distflow.backends.machines.connection.link import AgentLink
from distflow.backends.machines.connection.training_address import path_prepend
from distflow.errors import NodeError
from distflow.runtime.untrusted import decode_json

__all__ = ["AllReduce", "all_reduce", "judge_all_reduce"]

_MARK = "@@distflow-all-reduce "
_LIMIT_S = 180.0
_SLOW = 100e6
"""Bytes per second of gigabit Ethernet."""
_TAIL = 300
_SHORTEST_S = 1e-9
"""Lower bound of times. Nodes report them, and they are divisors."""

_PORT = "import socket, sys; s = socket.socket(); s.bind((sys.argv[1], 0)); print(s.getsockname()[1])"
_PROBE = f"""
import datetime, json, time
import torch, torch.distributed as dist
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
found = []
for size in (1 << 10, 1 << 20, 1 << 24):
    data = torch.zeros(size // 4)
    dist.all_reduce(data)
    times = []
    for _ in range(5):
        dist.barrier()
        begin = time.perf_counter()
        dist.all_reduce(data)
        times.append(time.perf_counter() - begin)
    found.append([size, min(times)])
dist.barrier()
dist.destroy_process_group()
print("\\n{_MARK}" + json.dumps(found), flush=True)
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class AllReduce:
    """The result of an all-reduce."""

    nodes: tuple[str, ...]
    times: tuple[tuple[int, float], ...] = ()
    """Summed bytes, and the shortest time in seconds."""
    skipped: str = ""
    """Why it was skipped."""
    failed: tuple[str, str] | None = None
    """The node on which it failed first, and the cause."""

    def bus_bandwidth(self, size: int, seconds: float) -> float:
        """Return the bytes per second that crossed each node's link: 2(n-1)/n × size / time.

        NCCL's tests define it like this (nccl-tests, doc/PERFORMANCE.md), so it can be compared with the link's speed.
        """
        count = len(self.nodes)
        return 2 * (count - 1) / count * size / seconds

    @property
    def best(self) -> float:
        """The largest bus bandwidth of all sizes, in bytes per second."""
        return max((self.bus_bandwidth(size, seconds) for size, seconds in self.times), default=0.0)


def all_reduce(nodes: Sequence[tuple[Measured, AgentLink]]) -> AllReduce:
    """Run an all-reduce on all of these nodes. Errors of nodes are in the result, and never raised.

    If it fails on one node, the connections to all of them are closed.
    """
    names = tuple(measured.node.name for measured, _ in nodes)
    if len(nodes) < 2:
        return AllReduce(nodes=names, skipped="it takes two nodes that answer")
    without = [measured.node.name for measured, _ in nodes if measured.torch is None or not measured.torch.version]
    if without:
        return AllReduce(nodes=names, skipped=f"{few(without)} {'has' if len(without) == 1 else 'have'} no torch")
    master, link = nodes[0]
    try:
        said = _run(master, link, [_PORT, master.address], {})
        port = int(str(said["stdout"]).strip())
    except (NodeError, ValueError) as why:
        return AllReduce(nodes=names, failed=(names[0], f"no port of {master.address} can be had: {why}"))
    return _world(nodes, names, port)


def _world(nodes: Sequence[tuple[Measured, AgentLink]], names: tuple[str, ...], port: int) -> AllReduce:
    lock, failures, answers = threading.Lock(), list[tuple[str, str]](), dict[int, str]()

    def run(rank: int) -> None:
        measured, link = nodes[rank]
        world = {
            "MASTER_ADDR": nodes[0][0].address, "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": str(len(nodes)),
        }  # fmt: skip
        if measured.interface:
            world["GLOO_SOCKET_IFNAME"] = measured.interface
        try:
            said = _run(measured, link, [_PROBE], world)
            why = _why(said)
        except NodeError as gone:
            said, why = {"stdout": ""}, gone.detail
        with lock:
            if why:
                failures.append((measured.node.name, why))
            answers[rank] = str(said["stdout"])
        if why and len(failures) == 1:
            for _, other in nodes:
                other.close()  # the processes there would wait forever; they end with their connection

    with ThreadPoolExecutor(max_workers=len(nodes)) as workers:
        list(workers.map(run, range(len(nodes))))
    if failures:
        return AllReduce(nodes=names, failed=failures[0])
    try:
        line = next(line for line in reversed(answers[0].splitlines()) if line.startswith(_MARK))
        times = tuple((int(size), max(float(seconds), _SHORTEST_S)) for size, seconds in decode_json(line.removeprefix(_MARK)))
    except (StopIteration, ValueError, TypeError):
        return AllReduce(nodes=names, failed=(names[0], "its output is not a measurement"))
    return AllReduce(nodes=names, times=times)


def _run(measured: Measured, link: AgentLink, script: Sequence[str], world: Mapping[str, str]) -> Mapping[str, Any]:
    return link.request(
        "run", argv=[measured.node.python, "-c", *script], env={**measured.node.environment, **world},
        path_prepend=path_prepend(measured.node, measured.facts), shell_prelude=measured.node.setup, limit_s=_LIMIT_S,
        timeout_s=_LIMIT_S + 10.0,
    )  # fmt: skip


def _why(said: Mapping[str, Any]) -> str:
    """Return why a process failed, or an empty string if it succeeded."""
    if said["exit_code"] == 0:
        return ""
    if said["exit_code"] is None:
        return f"it did not end within {_LIMIT_S:g} s"
    words = str(said["stderr"]).strip().splitlines()
    return words[-1][:_TAIL] if words else f"exit code {said['exit_code']}"


def judge_all_reduce(found: AllReduce) -> Iterator[Finding]:
    """Yield findings about the all-reduce."""
    if found.failed is not None:
        name, why = found.failed
        hint = "training would fail so, too: see that all ports are open between the nodes, and that their torch is the same"
        yield error("all-reduce", [name], f"an all-reduce between the nodes failed: {why}", hint)
    elif found.times and found.best < _SLOW:
        hint = "less than gigabit Ethernet gives: is `address` on the fast network, and its link up at full speed (`ethtool`)?"
        yield warning("all-reduce", found.nodes, f"an all-reduce moves {found.best / 1e6:.1f} MB/s only", hint)
