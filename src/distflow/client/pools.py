"""Pools and their nodes as they are configured, what is in use of them, the preferred pool, and the check of their nodes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from distflow.client.client import Client
from distflow.documents.text import did_you_mean
from distflow.errors import NotFound, RecordUnreadable
from distflow.layout.placement.node_placement import Demand
from distflow.lifecycle.states import State
from distflow.plan.compile import demands
from distflow.pools.choose import choose_pool, with_hosts
from distflow.pools.hostfile import Host
from distflow.pools.model import Configuration, Node, Pool
from distflow.state.profile import write_pool

if TYPE_CHECKING:
    from distflow.backends.machines.checks.checking import Checked
    from distflow.backends.machines.checks.reachability import Verdict

__all__ = [
    "NodeUsage",
    "PoolCheck",
    "UsageByNode",
    "check_pool",
    "check_pool_nodes",
    "choose_pool",
    "find_node",
    "list_nodes",
    "list_pools",
    "prefer_pool",
    "usage_by_node",
]

UsageByNode = Mapping[tuple[str, str], Sequence[tuple[str, Demand]]]
"""Names of tasks and what they hold, by pool and node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeUsage:
    """A node with what it has and what of it is in use; ``None``: not configured, so not known before it is reached."""

    pool: Pool
    node: Node
    held: Sequence[tuple[str, Demand]]
    """Names of tasks, and what they hold."""

    @property
    def amounts(self) -> tuple[tuple[int, int | None], ...]:
        """Used and total CPUs, memory (bytes) and GPUs."""
        held = [demand for _, demand in self.held]
        return (
            (sum(one.cpus for one in held), self.node.cpus),
            (sum(one.memory for one in held), self.node.memory),
            (sum(one.gpus for one in held), self.node.gpus),
        )


def list_pools(client: Client, names: Sequence[str] = (), *, hosts: Sequence[Host] | None = None) -> Configuration:
    """Return the configuration with the pools of these names, all without any. Raises ``NotFound``."""
    configuration = with_hosts(client.configuration(), hosts)
    if names:
        configuration = replace(configuration, pools={name: choose_pool(configuration, given=name) for name in names})
    return configuration


def list_nodes(
    client: Client,
    names: Sequence[str] = (),
    *,
    all_pools: bool = False,
    platforms: Collection[str] = (),
    hosts: Sequence[Host] | None = None,
) -> list[NodeUsage]:
    """Return nodes with what this user's unfinished workflows use of them. No node is asked.

    Args:
        client: Whose configuration and workflows.
        names: Pools; else the default one.
        all_pools: All pools instead.
        platforms: Only nodes of these platforms.
        hosts: Machines that are the default pool.

    Raises:
        NotFound: for an unknown pool.

    """
    configuration = with_hosts(client.configuration(), hosts)
    held = usage_by_node(client)
    return [
        NodeUsage(pool=pool, node=node, held=held.get((pool.name, node.name), ()))
        for pool in _pools(configuration, names, all_pools)
        for node in pool.nodes
        if not platforms or node.platform in platforms
    ]


def find_node(
    client: Client, name: str, *, pool: str | None = None, platform: str | None = None, hosts: Sequence[Host] | None = None
) -> list[NodeUsage]:
    """Return a node in every pool that has it, or in one. Raises ``NotFound``."""
    configuration = with_hosts(client.configuration(), hosts, given=pool)
    pools = [choose_pool(configuration, given=pool)] if pool else list(configuration.pools.values())
    held = usage_by_node(client)
    everywhere = [
        NodeUsage(pool=one, node=member, held=held.get((one.name, member.name), ())) for one in pools for member in one.nodes
    ]
    found = [one for one in everywhere if one.node.name == name and platform in (None, one.node.platform)]
    if not found:
        where = (f" of pool {pool!r}" if pool else "") + (f" of platform {platform!r}" if platform else "")
        raise NotFound(
            f"there is no node {name!r}{where}", hint=did_you_mean(name, [one.node.name for one in everywhere], what="nodes")
        )
    return found


def usage_by_node(client: Client) -> UsageByNode:
    """Return what tasks of unfinished workflows hold, by pool and node; remark on those whose records cannot be read."""
    store = client.store
    found: dict[tuple[str, str], list[tuple[str, Demand]]] = {}
    unknown = store.uuids(are_unfinished=True)
    for record in store.unfinished():
        groups = [one for one in record.groups if one.state in (State.INITIALIZING, State.RUNNING, State.STOPPING)]
        try:
            plan = store.plan(record.uuid) if groups else None
        except RecordUnreadable:
            continue
        unknown -= {record.uuid}
        for group in groups:
            asked = {demand.task: demand for demand in demands(plan.group(group.name))} if plan else {}
            for task in group.tasks:
                if task.node is not None and not task.state.is_final:
                    found.setdefault((record.pool, task.node), []).append((f"{record.id}/{task.name}", asked[task.name]))
    for uuid in sorted(unknown & store.uuids(are_unfinished=True)):  # none that has just ended
        client.notify(f"warning: what workflow {uuid} holds is not counted: another version of distflow wrote it")
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolCheck:
    """What was measured on the nodes of a pool, and whether a gang can run there."""

    pool: Pool
    checked: Checked
    verdict: Verdict


def check_pool(
    client: Client,
    name: str | None = None,
    nodes: Sequence[str] = (),
    *,
    hosts: Sequence[Host] | None = None,
    all_reduce: bool = False,
    paths: Sequence[str] = (),
    on_progress: Callable[[str], None] = lambda _: None,
) -> PoolCheck:
    """Measure the nodes of a pool, and find out whether a gang can run there. No task is started, and no GPU is held.

    Args:
        client: Whose configuration.
        name: The pool; else the default one.
        nodes: Only these nodes of it.
        hosts: Machines that are a pool of their own.
        all_reduce: Whether to sum over all nodes with torch, for the bandwidth.
        paths: Paths of the nodes that are to exist and to hold the same everywhere.
        on_progress: Called with what is being checked.

    Raises:
        NotFound: for an unknown pool or node.

    """
    pool = choose_pool(client.configuration(), given=name, hosts=hosts)
    there = [node.name for node in pool.nodes]
    for node in nodes:
        if node not in there:
            raise NotFound(f"the pool {pool.name!r} has no node {node!r}", hint=did_you_mean(node, there, what="nodes"))
    return check_pool_nodes(pool, nodes or there, all_reduce=all_reduce, paths=paths, on_progress=on_progress)


def check_pool_nodes(
    pool: Pool,
    names: Collection[str],
    *,
    all_reduce: bool = False,
    paths: Sequence[str] = (),
    on_progress: Callable[[str], None] = lambda _: None,
) -> PoolCheck:
    """Measure the nodes of these names; the arguments are those of ``check_pool``."""
    # paramiko comes with the nodes.
    from distflow.backends.machines.checks.checking import check_pool as measure
    from distflow.backends.machines.checks.reachability import verdict

    chosen = [node for node in pool.nodes if node.name in names]
    checked = measure(pool, chosen, on_progress, with_all_reduce=all_reduce, paths=paths)
    return PoolCheck(pool=pool, checked=checked, verdict=verdict(checked.nodes, checked.pairs, checked.all_reduce))


def prefer_pool(client: Client, name: str | None) -> None:
    """Prefer a pool where none is named, on this machine and for this user; ``None``: none. Raises ``NotFound``."""
    if name is not None:
        known = client.configuration(profile=False).pools
        if name not in known:
            raise NotFound(f"there is no pool {name!r}", hint=did_you_mean(name, known, what="pools"))
    write_pool(client.writable_directory().profile, name)


def _pools(configuration: Configuration, names: Sequence[str], all_pools: bool) -> Iterator[Pool]:
    if all_pools:
        yield from configuration.pools.values()
    elif names:
        yield from (choose_pool(configuration, given=name) for name in names)
    else:
        yield choose_pool(configuration)
