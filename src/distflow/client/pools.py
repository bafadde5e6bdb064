"""List pools and their nodes with the resources in use, set the preferred pool, and check nodes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from msgspec import Struct

from distflow.client.client import Client
from distflow.documents.requirements import Requirements
from distflow.documents.text import did_you_mean
from distflow.errors import InputError, NodeError, NotFound, RecordUnreadable
from distflow.layout.placement import Demand
from distflow.lifecycle.states import State
from distflow.plan.compile import demands
from distflow.pools.hostfile import Host, choose_pool, with_hosts
from distflow.pools.model import NO_SETTINGS, Configuration, Node, NodeSettings, Pool
from distflow.state.directory import write_profile
from distflow.structs import replace

if TYPE_CHECKING:
    from distflow.backends.machines.checks.checking import PoolMeasurements
    from distflow.backends.machines.checks.network import Verdict

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
"""The names of tasks and their resources, by pool and node."""


class NodeUsage(Struct, frozen=True, kw_only=True):
    """A node and the resources that tasks hold on it."""

    pool: Pool
    node: Node
    held: Sequence[tuple[str, Demand]]
    """The names of tasks and their resources."""

    @property
    def amounts(self) -> tuple[tuple[int, int | None], ...]:
        """Used and total CPUs, memory (bytes) and GPUs. A total that is not configured is ``None``."""
        held = [demand for _, demand in self.held]
        return (
            (sum(one.cpus for one in held), self.node.cpus),
            (sum(one.memory for one in held), self.node.memory),
            (sum(one.gpus for one in held), self.node.gpus),
        )


def list_pools(client: Client, names: Sequence[str] = (), *, hosts: Sequence[Host] | None = None) -> Configuration:
    """Return the configuration, reduced to some of its pools.

    Args:
        client: The client whose configuration has the pools.
        names: Names of pools. Default: all pools.
        hosts: Machines to use as the nodes of the default pool.

    Raises:
        NotFound: if a pool does not exist.
        ProblemsFound: if the configuration is wrong.

    """
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
    """Return nodes with the resources that this user's unfinished workflows hold. This does not connect to a node.

    Args:
        client: The client whose configuration has the pools and whose store has the workflows.
        names: Names of pools. Default: the default pool.
        all_pools: Whether to use all pools instead.
        platforms: Return only nodes of these platforms. Default: all.
        hosts: Machines to use as the nodes of the default pool.

    Raises:
        NotFound: if a pool does not exist.
        ProblemsFound: if the configuration is wrong.

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
    """Return one entry for each pool that has a node of this name.

    Args:
        client: The client whose configuration has the pools and whose store has the workflows.
        name: The name of the node.
        pool: Search only this pool. Default: all pools.
        platform: Return only nodes of this platform.
        hosts: Machines to use as the nodes of ``pool``, or else of the default pool.

    Raises:
        InputError: if ``pool`` cannot use ``hosts``.
        NotFound: if the pool or the node does not exist.

    """
    configuration = with_hosts(client.configuration(), hosts, given=pool)
    pools = [choose_pool(configuration, given=pool)] if pool else list(configuration.pools.values())
    held = usage_by_node(client)
    members = [
        NodeUsage(pool=one, node=member, held=held.get((one.name, member.name), ())) for one in pools for member in one.nodes
    ]
    found = [one for one in members if one.node.name == name and platform in (None, one.node.platform)]
    if not found:
        missing = f"pool `{pool}` has no node `{name}`" if pool else f"there is no node `{name}`"
        missing += f" with platform `{platform}`" if platform else ""
        known = [one.node.name for one in members if platform in (None, one.node.platform)]
        raise NotFound(missing, hint=did_you_mean(name, known, what="nodes"))
    return found


def usage_by_node(client: Client) -> UsageByNode:
    """Return the resources that tasks of unfinished workflows hold, by pool and node.

    A workflow whose record cannot be read causes a warning through ``client.notify``.
    """
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
            demand_of = {demand.task: demand for demand in demands(plan.group(group.name))} if plan else {}
            for task in group.tasks:
                if task.node is not None and not task.state.is_final:
                    found.setdefault((record.pool, task.node), []).append((f"{record.id}/{task.name}", demand_of[task.name]))
    unknown &= store.uuids(are_unfinished=True)  # ignore workflows that have just ended
    for name in sorted(name for uuid, name in (store.ids() if unknown else {}).items() if uuid in unknown):
        client.notify(f"warning: the usage of workflow {name} is not included: another version of distflow stored it")
    return found


class PoolCheck(Struct, frozen=True, kw_only=True):
    """The measurements of a pool's nodes, and the verdict whether a gang can run on them."""

    pool: Pool
    checked: PoolMeasurements
    verdict: Verdict


def check_pool(
    client: Client,
    name: str | None = None,
    nodes: Sequence[str] = (),
    *,
    hosts: Sequence[Host] | None = None,
    settings: NodeSettings = NO_SETTINGS,
    all_reduce: bool = False,
    paths: Sequence[str] = (),
    on_progress: Callable[[str], None] = lambda _: None,
) -> PoolCheck:
    """Measure the nodes of a pool and check whether a gang can run on them. This starts no task and reserves no GPU.

    If an engine (Slurm, Kubernetes or Ray) chooses the nodes of the pool, check the engine instead.

    Args:
        client: The client whose configuration has the pool.
        name: The name of the pool. Default: the default pool.
        nodes: Names of nodes of the pool. Default: all its nodes.
        hosts: Machines to use instead of the nodes of the pool.
        settings: Settings of the nodes that take precedence over those of the pool and the hostfile.
        all_reduce: Whether to run an all-reduce over all nodes with torch, to measure the bandwidth.
        paths: Files and directories that must exist on all nodes. Different names or sizes of files cause a warning.
            The contents of files are not compared.
        on_progress: Called with a description of the progress, such as ``checking nodes: 3 of 8 done, waiting for gpu2``.

    Returns:
        The measurements and the verdict. Errors of nodes are part of it and are not raised.

    Raises:
        InputError: if ``nodes``, ``all_reduce`` or ``paths`` are given for a pool whose nodes an engine chooses, or if the
            named pool cannot use ``hosts``.
        NotFound: if the pool or a node does not exist.
        ProblemsFound: if the configuration is wrong.

    """
    pool = choose_pool(client.configuration(), given=name, hosts=hosts).with_settings(settings)
    if pool.is_allocated and (nodes or all_reduce or paths):
        raise InputError(
            f"pool `{pool.name}` has no nodes of its own to check, because {pool.backend} chooses them",
            hint="leave out --node, --all-reduce and --path",
        )
    known = [node.name for node in pool.nodes]
    for node in nodes:
        if node not in known:
            raise NotFound(f"pool `{pool.name}` has no node `{node}`", hint=did_you_mean(node, known, what="nodes"))
    return check_pool_nodes(
        pool, nodes or known, all_reduce=all_reduce, paths=paths, venv=pool.given.venv or pool.venv, on_progress=on_progress
    )


def check_pool_nodes(
    pool: Pool,
    names: Collection[str],
    *,
    all_reduce: bool = False,
    paths: Sequence[str] = (),
    torch_nodes: Collection[str] = (),
    venv: Requirements | None = None,
    on_progress: Callable[[str], None] = lambda _: None,
) -> PoolCheck:
    """Measure the nodes of these names, as ``check_pool`` does. If an engine chooses the nodes, check the engine instead.

    ``torch_nodes`` are the nodes whose tasks need torch. ``venv`` are the packages of the tasks' Python environment.
    """
    if pool.is_allocated:
        return _check_engine(pool, on_progress)
    # Most callers do not need these modules.
    from distflow.backends.machines.checks.checking import check_pool as measure
    from distflow.backends.machines.checks.network import verdict

    chosen = [node for node in pool.nodes if node.name in names]
    checked = measure(pool, chosen, on_progress, with_all_reduce=all_reduce, paths=paths, venv=venv)
    found = verdict(checked.nodes, checked.pairs, checked.all_reduce, torch_nodes=torch_nodes)
    return PoolCheck(pool=pool, checked=checked, verdict=found)


def _check_engine(pool: Pool, on_progress: Callable[[str], None]) -> PoolCheck:
    """Check the engine that allocates the nodes of a pool."""
    from distflow.backends.allocated.engines import open_engine
    from distflow.backends.machines.checks.checking import PoolMeasurements
    from distflow.backends.machines.checks.findings import error, folded
    from distflow.backends.machines.checks.network import Verdict

    engine = open_engine(pool)
    try:
        findings = folded(engine.check(on_progress))
    except NodeError as failed:
        findings = (error("ssh" if pool.login is not None else pool.backend, (failed.node,), failed.detail, failed.hint),)
    finally:
        engine.close()
    worst = next((one for one in findings if one.grade.value == "error"), None)
    summary = "can run gangs" if worst is None else f"may be unable to run gangs: {worst.message}"
    return PoolCheck(
        pool=pool,
        checked=PoolMeasurements(nodes=(), pairs=()),
        verdict=Verdict(can_run=worst is None, text=f"pool {pool.name} {summary}", findings=findings),
    )


def prefer_pool(client: Client, name: str | None) -> None:
    """Set the pool that this user's commands on this machine use if they do not name one.

    Args:
        client: The client whose state directory stores the profile.
        name: The name of the pool, or ``None`` to use the configured default again.

    Raises:
        NotFound: if the pool does not exist.
        StateError: if the state directory is not writable.

    """
    if name is not None:
        known = client.configuration(profile=False).pools
        if name not in known:
            raise NotFound(f"there is no pool `{name}`", hint=did_you_mean(name, known, what="pools"))
    write_profile(client.writable_directory().profile, "pool", name)


def _pools(configuration: Configuration, names: Sequence[str], all_pools: bool) -> Iterator[Pool]:
    if all_pools:
        yield from configuration.pools.values()
    elif names:
        yield from (choose_pool(configuration, given=name) for name in names)
    else:
        yield choose_pool(configuration)
