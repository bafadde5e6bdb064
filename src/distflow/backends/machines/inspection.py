"""Queries to nodes: the holders of their resources, and the stacks of running tasks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import Struct, convert

from distflow.backends.machines.backend import link_to, transport_of
from distflow.backends.machines.connection.bootstrap import connect
from distflow.backends.machines.connection.training_address import path_prepend
from distflow.errors import DistflowError
from distflow.pools.model import Node, Pool
from distflow.transports.base import Transport, fan_out

__all__ = ["Holder", "Holders", "InspectedTask", "TaskStacks", "ask_holders", "collect_stacks"]


_HOLDERS_S = 60.0


class Holder(Struct, frozen=True, kw_only=True):
    """An attempt, of any user, that holds a lease."""

    user: str
    attempt: str
    """``<workflow uuid>/<group>/<task>/<n>``. Not trusted, because that user wrote it."""
    label: str = ""
    """``<workflow id>/<task>``; empty if the lease does not contain it."""
    pid: int | None
    """Process id of the attempt's runner; ``None`` if the lease does not contain it. Not trusted either."""
    gpus: tuple[int, ...] = ()
    ports: tuple[int, ...] = ()
    cpus: int = 0
    memory: int = 0
    """Bytes."""


class Holders(Struct, frozen=True, kw_only=True):
    """The holders of one node's resources, or why the query failed."""

    holders: tuple[Holder, ...] = ()
    foreign: tuple[tuple[int, str], ...] = ()
    """Processes on unleased GPUs: the GPU's index, and a description of the process."""
    error: str = ""


def ask_holders(pool: Pool, node: Node) -> Holders:
    """Query one node. If the query fails, the result contains the error; no exception is raised."""
    try:
        with link_to(pool, node) as link:
            answer = link.request("holders", lease_dir=node.lease_dir, timeout_s=_HOLDERS_S)
    except DistflowError as error:
        return Holders(error=error.detail)
    return Holders(
        holders=convert(answer["holders"], tuple[Holder, ...]),
        foreign=tuple((int(one["gpu"]), str(one["words"])) for one in answer["foreign"]),
    )


_STACKS_S = 120.0


class InspectedTask(Struct, frozen=True, kw_only=True):
    """A running task whose processes are inspected."""

    name: str
    group: str
    """The task's group. The tasks of a group may form a world."""
    attempt: str
    """The attempt's name on its node."""
    node: Node


class TaskStacks(Struct, frozen=True, kw_only=True):
    """The stacks, collectives and heartbeat age of one task, as its node reported them, or why they are unknown.

    ``docs/agent-protocol.md`` describes the operation ``stacks``.
    """

    task: InspectedTask
    """The task that was inspected."""
    report: Mapping[str, Any] | None = None
    """The node's answer; ``None`` if there is an ``error``."""
    error: str = ""


def collect_stacks(pool: Pool, tasks: Sequence[InspectedTask]) -> tuple[TaskStacks, ...]:
    """Return the stacks of each task, in order. Errors of nodes are in the result, and never raised."""
    by_node: dict[str, list[InspectedTask]] = {}
    for one in tasks:
        by_node.setdefault(one.node.name, []).append(one)
    nodes = {one.node.name: one.node for one in tasks}
    transports = [transport_of(pool, node) for node in nodes.values()]
    try:
        outcomes = fan_out(transports, lambda transport: _of_node(pool, transport, by_node[transport.name]))
    finally:
        for transport in transports:
            transport.close()
    found: dict[str, TaskStacks] = {}
    for outcome in outcomes:
        for one in by_node[outcome.node]:
            found[one.name] = TaskStacks(task=one, error=str(outcome.error or ""))
        found |= {one.task.name: one for one in outcome.value or ()}
    return tuple(found[one.name] for one in tasks)


def _of_node(pool: Pool, transport: Transport, tasks: Sequence[InspectedTask]) -> list[TaskStacks]:
    node = tasks[0].node
    link = connect(transport, node.root, node.python, timeout_s=pool.connect_timeout_s, ping_s=pool.ping_s)
    found = []
    try:
        path = path_prepend(node, link.request("hello", watch=[])["facts"])
        for one in tasks:
            try:
                report = link.request(
                    "stacks", attempt=one.attempt, env=dict(node.environment), path_prepend=path, timeout_s=_STACKS_S
                )
                found.append(TaskStacks(task=one, report=report))
            except DistflowError as error:
                found.append(TaskStacks(task=one, error=str(error)))
    finally:
        link.close()
    return found
