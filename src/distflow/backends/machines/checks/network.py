"""Findings about connections between nodes, the all-reduce between them, and the summary of a check.

There are n·(n-1) connections between n nodes. A disconnected machine fails in 2·(n-1) of them, and is usually reported in two
findings.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import MappingProxyType
from typing import Any

from msgspec import Struct

from distflow.backends.machines.checks.findings import (
    Finding,
    Grade,
    error,
    folded,
    judge_node,
    judge_nodes,
    judge_torch,
    warning,
)
from distflow.backends.machines.checks.measured import NodeMeasurements, Pair
from distflow.backends.machines.connection.link import AgentLink
from distflow.backends.machines.connection.training_address import interpreter, path_prepend
from distflow.documents.text import few
from distflow.errors import NodeError
from distflow.runtime.untrusted import decode_json

__all__ = ["AllReduce", "Verdict", "all_reduce", "judge_all_reduce", "judge_pairs", "run_python", "verdict"]


_CAUSES: Mapping[str, str] = MappingProxyType(
    {
        "refused": "connection refused",
        "timeout": "no answer",
        "no_route": "no route to host",
        "no_name": "the address is a name that cannot be resolved",
        "stranger": "another machine or program answers",
    }
)
_WITHOUT_TORCH = (
    ", but without torch, which torchrun and distflow.train need: install it, or name a Python that has it with `--python`"
)
_PORTS = "training uses ports that the system chooses: open all TCP ports above 1023 between the nodes"
_HINTS: Mapping[str, str] = MappingProxyType(
    {
        "refused": "check that no firewall rejects the connection, and that the address belongs to the node\n"
        f"{_PORTS}, or set the node's `address`",
        "timeout": f"a firewall drops the packets, or the networks are not connected\n{_PORTS}, or set the node's `address`",
        "no_route": "check that both are in one network, and that no firewall rejects the connection\n"
        f"{_PORTS}, or set the node's `address` to an address that the others reach",
        "no_name": "set the node's `address` to an IP address, such as 10.0.0.2",
        "stranger": "set the node's `address` to one of its own addresses",
    }
)


class Verdict(Struct, frozen=True, kw_only=True):
    """The result of a check."""

    can_run: bool
    """Whether a gang can run on all of these nodes."""
    text: str
    """Summary in one sentence."""
    findings: tuple[Finding, ...]
    """Errors first."""


def verdict(
    nodes: Sequence[NodeMeasurements],
    pairs: Sequence[Pair],
    reduction: AllReduce | None = None,
    *,
    torch_nodes: Collection[str] = (),
) -> Verdict:
    """Return all findings about nodes, pairs and their all-reduce, and a summary. ``torch_nodes``: nodes that need torch."""
    alone = [finding for measured in nodes for finding in judge_node(measured)]
    alone += judge_torch(nodes, torch_nodes)
    together = list(judge_all_reduce(reduction)) if reduction is not None else []
    compared = list(judge_nodes(nodes))
    findings = folded([*alone, *judge_pairs(nodes, pairs), *together, *compared])
    errors = [finding for finding in findings if finding.grade is Grade.ERROR]
    count = f"{len(nodes)} node{'s' * (len(nodes) != 1)}"
    if not errors:
        without = "" if any(map(_may_have_torch, nodes)) else _WITHOUT_TORCH
        return Verdict(can_run=True, text=f"{count} can run a gang{without}", findings=findings)
    bad = list(dict.fromkeys(name for finding in alone if finding.grade is Grade.ERROR for name in finding.nodes))
    why = [f"{few(bad)} cannot take part"] if bad else []
    cut = list(dict.fromkeys(name for pair in pairs if pair.kind != "ok" for name in (pair.source, pair.target)))
    if cut:
        why.append(f"{few(cut)} do not all reach each other")
    why += [
        f"{few(finding.nodes)} are the same machine, or share leases" for finding in compared if finding.grade is Grade.ERROR
    ]
    if any(finding.grade is Grade.ERROR for finding in together):
        why.append("an all-reduce between them failed")
    all_of_them = "both nodes" if len(nodes) == 2 else f"all {count}"
    what = f"a gang cannot run on {all_of_them}" if len(nodes) > 1 else "nothing can run on this node"
    return Verdict(can_run=False, text=f"{what}: {', and '.join(why)}", findings=findings)


def _may_have_torch(measured: NodeMeasurements) -> bool:
    """Return False if the node's Python is known to have no torch. A torch that cannot be imported counts as torch."""
    torch = measured.torch
    return torch is None or bool(torch.version or torch.error) or not torch.python


def judge_pairs(nodes: Sequence[NodeMeasurements], pairs: Sequence[Pair]) -> Iterator[Finding]:
    """Yield errors about failed connections: one for each node and cause."""
    addresses = {one.node.name: one.address for one in nodes}
    answered = [one.node.name for one in nodes if one.error is None]
    failed = [pair for pair in pairs if pair.kind != "ok"]
    same_address = [pair for pair in failed if addresses.get(pair.source) == pair.address]
    yield from _judge_same_address(same_address)
    failed = [pair for pair in failed if pair not in same_address]
    for source, kind in dict.fromkeys((pair.source, pair.kind) for pair in failed):
        mine = [pair for pair in failed if (pair.source, pair.kind) == (source, kind)]
        if len(mine) > 1 and len(mine) == len(answered) - 1:
            failed = [pair for pair in failed if pair not in mine]
            yield _finding((source,), "it reaches none of the other nodes", mine[0])
    for target, kind in dict.fromkeys((pair.target, pair.kind) for pair in failed):
        same = [pair for pair in failed if (pair.target, pair.kind) == (target, kind)]
        sources = [pair.source for pair in same]
        if len(same) > 1 and len(same) == len(answered) - 1:
            yield _finding((target,), f"no other node reaches it at {same[0].address}", same[0])
        else:
            yield _finding((target,), f"{few(sources)} cannot reach it at {same[0].address}", same[0])


def _judge_same_address(pairs: Sequence[Pair]) -> Iterator[Finding]:
    """Yield an error for nodes that have the same address but are different machines."""
    groups: dict[str, list[str]] = {}
    for pair in pairs:
        groups.setdefault(pair.address, []).extend((pair.source, pair.target))
    for address, names in groups.items():
        hint = "set `address` of each to its own address on the training network"
        if address.startswith("127.") or address == "::1":
            hint = f"{address} is the same on every machine: {hint}"
        nodes = tuple(dict.fromkeys(names))
        message = f"these nodes have the same training address {address}"
        yield Finding(grade=Grade.ERROR, about="reach", nodes=nodes, message=message, hint=hint)


def _finding(nodes: tuple[str, ...], message: str, pair: Pair) -> Finding:
    cause = _CAUSES.get(pair.kind) or pair.message or pair.kind
    if pair.kind == "timeout" and pair.message:
        cause = pair.message
    hint = _HINTS.get(pair.kind, _PORTS)
    return Finding(grade=Grade.ERROR, about="reach", nodes=nodes, message=f"{message}: {cause}", hint=hint)


_MARK = "@@distflow-all-reduce "
_LIMIT_S = 180.0
_SLOW = 100e6
"""Bytes per second. Gigabit Ethernet reaches a little more."""
_TAIL = 300
_SHORTEST_S = 1e-9
"""Lower bound of the times that nodes report, because they are divisors."""

_PORT = "import socket, sys; s = socket.socket(); s.bind((sys.argv[1], 0)); print('\\n%d' % s.getsockname()[1])"
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


class AllReduce(Struct, frozen=True, kw_only=True):
    """The result of an all-reduce."""

    nodes: tuple[str, ...]
    times: tuple[tuple[int, float], ...] = ()
    """For each size of the summed tensor: the bytes, and the shortest time in seconds."""
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


def all_reduce(nodes: Sequence[tuple[NodeMeasurements, AgentLink]]) -> AllReduce:
    """Run an all-reduce on all of these nodes. Errors of nodes are in the result, and never raised.

    If the process on one node fails, the connections to all nodes are closed.
    """
    names = tuple(measured.node.name for measured, _ in nodes)
    if len(nodes) < 2:
        return AllReduce(nodes=names, skipped="at least two nodes must answer")
    if any(measured.lacks_venv for measured, _ in nodes):
        return AllReduce(nodes=names, skipped="the Python environment is not built yet")
    without = [measured.node.name for measured, _ in nodes if measured.torch is None or not measured.torch.version]
    if without:
        return AllReduce(nodes=names, skipped=f"{few(without)} {'has' if len(without) == 1 else 'have'} no usable torch")
    master, link = nodes[0]
    try:
        answer = _run(master, link, [_PORT, master.address], {})
        why = _failure(answer) or "its output contains no port"
        port = int(str(answer["stdout"]).strip().rpartition("\n")[2])  # `setup` may print text before it
    except (NodeError, ValueError) as error:
        why = error.detail if isinstance(error, NodeError) else why
        return AllReduce(nodes=names, failed=(names[0], f"it cannot open a port on {master.address}: {why}"))
    return _run_on_all(nodes, names, port)


def _run_on_all(nodes: Sequence[tuple[NodeMeasurements, AgentLink]], names: tuple[str, ...], port: int) -> AllReduce:
    lock, failures, answers = threading.Lock(), list[tuple[str, str]](), dict[int, str]()

    def run(rank: int) -> None:
        measured, link = nodes[rank]
        world = {
            "MASTER_ADDR": nodes[0][0].address, "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": str(len(nodes)),
        }  # fmt: skip
        if measured.interface:
            world["GLOO_SOCKET_IFNAME"] = measured.interface
        try:
            answer = _run(measured, link, [_PROBE], world)
            why = _failure(answer)
        except NodeError as error:
            answer, why = {"stdout": ""}, error.detail
        with lock:
            is_first = bool(why) and not failures
            if why:
                failures.append((measured.node.name, why))
            answers[rank] = str(answer["stdout"])
        if is_first:
            for _, other in nodes:
                other.close()  # ends the other processes, which would wait until their timeout

    with ThreadPoolExecutor(max_workers=len(nodes)) as workers:
        list(workers.map(run, range(len(nodes))))
    if failures:
        return AllReduce(nodes=names, failed=failures[0])
    try:
        line = next(line for line in reversed(answers[0].splitlines()) if line.startswith(_MARK))
        times = tuple((int(size), max(float(seconds), _SHORTEST_S)) for size, seconds in decode_json(line.removeprefix(_MARK)))
    except (StopIteration, ValueError, TypeError):
        return AllReduce(nodes=names, failed=(names[0], "its output contains no measurements"))
    return AllReduce(nodes=names, times=times)


def _run(measured: NodeMeasurements, link: AgentLink, script: Sequence[str], world: Mapping[str, str]) -> Mapping[str, Any]:
    return run_python(measured, link, script, world, limit_s=_LIMIT_S)


def run_python(
    measured: NodeMeasurements, link: AgentLink, script: Sequence[str], variables: Mapping[str, str], *, limit_s: float
) -> Mapping[str, Any]:
    """Run a script with the Python of the node's tasks: with their setup, variables, PATH and packages.

    Raises ``NodeError``, which is an ``AgentError`` of the kind ``no_venv`` if their environment is not built yet.
    """
    node, facts, venv = measured.node, measured.facts, measured.venv
    return link.request(
        "run", argv=["python" if venv is not None else interpreter(node, facts), "-c", *script],
        env={**node.environment, **variables}, path_prepend=path_prepend(node, facts), shell_prelude=node.setup,
        venv=venv.digest(node.environment) if venv is not None else None, limit_s=limit_s, timeout_s=limit_s + 10.0,
    )  # fmt: skip


def _failure(answer: Mapping[str, Any]) -> str:
    """Return why a process failed, or an empty string if it succeeded."""
    if answer["exit_code"] == 0:
        return ""
    if answer["exit_code"] is None:
        return f"it did not end within {_LIMIT_S:g} s"
    lines = str(answer["stderr"]).strip().splitlines()
    return lines[-1][:_TAIL] if lines else f"exit code {answer['exit_code']}"


def judge_all_reduce(found: AllReduce) -> Iterator[Finding]:
    """Yield findings about the all-reduce."""
    if found.failed is not None:
        name, why = found.failed
        remedy = "check that all ports are open between the nodes, and that all have the same torch"
        if "Cannot assign requested address" in why:
            remedy = _HINTS["stranger"]
        hint = f"training would fail too: {remedy}"
        yield error("all-reduce", [name], f"an all-reduce between the nodes failed: {why}", hint)
    elif found.times and found.best < _SLOW:
        hint = "slower than gigabit Ethernet: check that `address` is on a fast interface that runs at full speed (`ethtool`)"
        yield warning("all-reduce", found.nodes, f"an all-reduce reaches only {found.best / 1e6:.1f} MB/s", hint)
