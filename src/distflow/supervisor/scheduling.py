"""Choose the waiting gangs that may lease nodes now, and compute which resources are free. This module does no I/O.

Gangs of one pool are ordered by priority, then by submission. A gang gets all of its nodes or none. A smaller gang does not
overtake one that waits for nodes, so that small gangs do not starve a large one. A gang that has nodes keeps them. Only one
gang per pool asks the nodes at a time, so two gangs never hold half of what both need. A gang that waits before a retry does
not hold up the others.

If a cluster engine chooses the nodes, each gang requests them without waiting for other gangs, because the engine has its own
queue.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise

from msgspec import Struct, field

from distflow.backends.base import LeaseRequest
from distflow.documents.text import few
from distflow.layout.placement import Demand, Free, Placement, Unplaced, place_near
from distflow.lifecycle.states import State
from distflow.plan.compile import demands
from distflow.plan.containers import venv_of
from distflow.plan.model import GroupPlan
from distflow.pools.model import Pool
from distflow.state.record import GroupRecord, UnreachableNodes, WorkflowRecord
from distflow.structs import replace
from distflow.supervisor.commands import Lease
from distflow.supervisor.snapshot import HeldResources, NodeView, PoolUsage, Snapshot, StoredWorkflow

__all__ = ["Leases", "capacity", "free", "next_leases", "pool_usage"]


_SETUP_AND_COLLECT_S = 3600.0
"""Seconds that a gang may need its nodes in addition to its ``exec_timeout``, to prepare and to collect its outputs."""
_LEASE_OUTLIVES_S = 15.0
"""Seconds by which the lease of a node outlives the time limit of the start barrier.

At that limit, the supervisor fails a gang that is not ready. If the lease expired then too, the supervisor could see a lost
lease instead, and would start the gang again.
"""


class Leases(Struct, kw_only=True):
    """The leases to request now, and the state of the groups that wait."""

    commands: list[Lease] = field(default_factory=list)
    messages: dict[tuple[str, str], str] = field(default_factory=dict)
    """Why groups wait, by workflow (uuid) and group."""
    unreachable: dict[tuple[str, str], UnreachableNodes] = field(default_factory=dict)
    """The unreachable nodes, for each group that does not fit on the remaining ones; by workflow (uuid) and group."""
    failures: dict[tuple[str, str], str] = field(default_factory=dict)
    """Why a group can never get its nodes, by workflow (uuid) and group."""
    wake_at: float | None = None

    def wake(self, at: Sequence[float]) -> None:
        """Move ``wake_at``, the time of the next decision, to the earliest of these times, unless it is earlier."""
        self.wake_at = min([*at, *([] if self.wake_at is None else [self.wake_at])], default=None)


def next_leases(snapshot: Snapshot, usages: Iterable[PoolUsage], now: float) -> Leases:
    """Return the lease commands of the gangs that may lease now, and the reasons why others wait.

    In a pool of machines, only the first waiting gang may lease. There are no reasons while a gang of the pool asks the nodes,
    and none for pools of an engine.

    ``usages`` are those of all workflows, in the order of their submission.
    """
    leases = Leases()
    by_pool: dict[str, list[PoolUsage]] = {}
    for usage in usages:
        by_pool.setdefault(usage.workflow.record.pool_key, []).append(usage)
    asking = {one.workflow for one in snapshot.in_flight if one.kind is Lease}
    for pool_key, pool in snapshot.pools.items():
        of_pool = by_pool.get(pool_key, [])
        waiting = [(usage.workflow, group) for usage in of_pool for group in usage.waiting]
        backoffs = [group.backoff_until for _, group in waiting if now < group.backoff_until]
        leases.wake(backoffs)
        waiting = [one for one in waiting if now >= one[1].backoff_until]
        if pool.is_allocated:
            _lease_from_engine(snapshot, pool_key, pool, waiting, now, leases)
            continue
        # The sort is stable: workflows of one priority stay in the order of submission.
        waiting.sort(key=lambda one: one[0].record.priority.turn)
        if waiting and not any(usage.workflow.record.uuid in asking for usage in (of_pool if asking else ())):
            _lease_for_first(snapshot, pool_key, pool, of_pool, waiting, now, leases)
    return leases


def _lease_from_engine(
    snapshot: Snapshot,
    pool_key: str,
    pool: Pool,
    waiting: Sequence[tuple[StoredWorkflow, GroupRecord]],
    now: float,
    leases: Leases,
) -> None:
    for workflow, group in waiting:
        due = max([group.not_before, *(one.until for one in group.refusals)])
        plan = workflow.plan.group(group.name)
        request = _request(workflow.record, group, plan, dict.fromkeys((one.task for one in plan.launches), ""), pool)
        command = Lease(pool_key, request)
        if now < due:
            leases.wake([due])
        elif command.id not in snapshot.in_flight:
            leases.commands.append(command)


def _lease_for_first(
    snapshot: Snapshot,
    pool_key: str,
    pool: Pool,
    usages: Sequence[PoolUsage],
    waiting: Sequence[tuple[StoredWorkflow, GroupRecord]],
    now: float,
    leases: Leases,
) -> None:
    views = [snapshot.nodes[pool_key, node.name] for node in pool.nodes]
    workflow, group = waiting[0]
    # Each gang names the one directly before it. The head of the queue changes often: naming it would add events for all gangs.
    for (before, earlier), (other, later) in pairwise(waiting):
        is_same = before.record.uuid == other.record.uuid
        ahead = f"the group {earlier.name} of this workflow" if is_same else before.record.id
        leases.messages[other.record.uuid, later.name] = f"behind {ahead}"
    plan = workflow.plan.group(group.name)
    available, avoided, is_connecting = _usable(plan, group, views, usages, shared=pool.shares_nodes)
    min_nodes = 1 if pool.shares_nodes else sum(launch.ranks is not None for launch in plan.launches)
    missing = _missing_nodes(plan, views, pool)
    if missing is not None:
        leases.unreachable[workflow.record.uuid, group.name] = missing
    if len(available) < min_nodes and is_connecting:
        if any(not view.up and view.error for view in views):
            leases.messages[workflow.record.uuid, group.name] = _wait_message(views, ())
        return
    # Nodes that refused are not asked again for a while; other suitable nodes are asked meanwhile.
    refused = {one.node: one.until for one in group.refusals if now < one.until}
    willing = [one for one in available if one.node not in refused]
    unplaced: tuple[Unplaced, ...] = ()
    sizes = _sizes(plan, group, now, leases)
    for size in sizes:
        placed = place_near(demands(size), willing, shared=pool.shares_nodes)
        if isinstance(placed, Placement):
            if now < group.not_before:
                leases.wake([group.not_before])
            else:
                leases.commands.append(Lease(pool_key, _request(workflow.record, group, size, placed.nodes, pool)))
            return
        unplaced = unplaced or placed
    if refused and isinstance(place_near(demands(sizes[-1]), available, shared=pool.shares_nodes), Placement):
        leases.wake(list(refused.values()))
    elif group.attempt == 0 and (never := _why_never_fits(plan, views, pool)):
        leases.failures[workflow.record.uuid, group.name] = (
            f"pool {workflow.record.pool} cannot run it, even when idle: {never}"
        )
    elif any(view.up or view.error for view in views):  # otherwise the first connections are still being made
        message = _wait_message(views, unplaced)
        message += f"; avoided because earlier attempts failed there: {few(sorted(avoided), ', ')}" if avoided else ""
        leases.messages[workflow.record.uuid, group.name] = message


def _why_never_fits(plan: GroupPlan, views: Sequence[NodeView], pool: Pool) -> str:
    """Return why the idle pool could not hold a gang; empty if it could, as far as is known."""
    placed = place_near(demands(plan.sizes[-1]), capacity(views), shared=pool.shares_nodes)
    return "" if isinstance(placed, Placement) else _no_room_message(placed)


def _missing_nodes(plan: GroupPlan, views: Sequence[NodeView], pool: Pool) -> UnreachableNodes | None:
    """Return the unreachable nodes of a pool if a gang does not fit on the others even when idle; otherwise ``None``."""
    down = [view for view in views if not view.up and view.error]

    def fits_on(some: Sequence[NodeView]) -> bool:
        return isinstance(place_near(demands(plan.sizes[-1]), capacity(some), shared=pool.shares_nodes), Placement)

    if not down or fits_on([view for view in views if view.up or not view.error]):
        return None
    may_return = [view for view in views if not view.needs_action]
    return UnreachableNodes(
        errors={view.node.name: view.error for view in down},
        needs_action=len(may_return) < len(views) and not fits_on(may_return),
    )


def _no_room_message(unplaced: Sequence[Unplaced]) -> str:
    return "; ".join(f"no room for {one.task}: {few(one.reasons, ', ')}" for one in unplaced[:1])


def _sizes(plan: GroupPlan, group: GroupRecord, now: float, leases: Leases) -> Sequence[GroupPlan]:
    """Return the sizes at which a gang may start now: its full size, and after a while the smaller ones of its spec."""
    patient_until = (group.scheduling_at or now) + plan.smaller_after_s
    if plan.smaller and now < patient_until:
        leases.wake([patient_until])
        return (plan,)
    return plan.sizes


def _usable(
    plan: GroupPlan, group: GroupRecord, views: Sequence[NodeView], usages: Sequence[PoolUsage], *, shared: bool
) -> tuple[list[Free], frozenset[str], bool]:
    """Return the free resources of usable nodes, the nodes to avoid, and whether some nodes are still being connected to."""
    # Nodes on which earlier attempts failed come last, so placement prefers the others.
    failures = Counter(cause.node for cause in group.earlier_causes)
    available = free(views, usages, plan.world.port if plan.world else None)
    if failures:
        available.sort(key=lambda one: failures[one.node])
    avoided = frozenset(name for name, count in failures.items() if name and 0 < plan.retry.avoid_after <= count)
    # While the first connections are being made, nothing is known about those nodes.
    is_connecting = any(not view.up and not view.error for view in views)
    if avoided and (is_connecting or _fits_elsewhere(avoided, available, demands(plan.sizes[-1]), shared=shared)):
        return [one for one in available if one.node not in avoided], avoided, is_connecting
    return available, frozenset(), is_connecting


def _fits_elsewhere(avoided: frozenset[str], available: Sequence[Free], demand: Sequence[Demand], *, shared: bool) -> bool:
    """Return whether a gang would fit on the nodes that are not avoided if they were idle."""
    empty = [
        replace(one, gpus=one.all_gpus, cpus=one.all_cpus, memory=one.all_memory, closed="")
        for one in available
        if one.node not in avoided
    ]
    return isinstance(place_near(demand, empty, shared=shared), Placement)


def _request(record: WorkflowRecord, group: GroupRecord, plan: GroupPlan, nodes: Mapping[str, str], pool: Pool) -> LeaseRequest:
    port: int | str | None = None
    if plan.world is not None:
        port = plan.world.port if plan.world.port is not None else "any"
    return LeaseRequest(
        workflow=record.uuid,
        group=group.name,
        attempt=group.attempt,
        nodes=dict(nodes),
        gpus={launch.task: launch.resource.gpu or 0 for launch in plan.launches},
        cpus={launch.task: launch.resource.cpu or 0 for launch in plan.launches},
        memory={launch.task: launch.resource.memory or 0 for launch in plan.launches},
        master=plan.master,
        port=port,
        start_timeout_s=pool.start_barrier_s + _LEASE_OUTLIVES_S,
        workflow_id=record.id,
        venvs=_venvs(plan, nodes, pool),
        platforms={one.task: one.resource.platform for one in plan.launches if one.resource.platform is not None},
        excluded=_excluded(plan, group),
        time_limit_s=None if plan.timeouts.exec_s is None else plan.timeouts.exec_s + _SETUP_AND_COLLECT_S,
        margin_s=_SETUP_AND_COLLECT_S,
        images={launch.task: launch.image for launch in plan.launches if launch.image is not None},
        mounts={launch.task: launch.mounts for launch in plan.launches if launch.mounts},
        priority=record.priority.value,
    )


def _excluded(plan: GroupPlan, group: GroupRecord) -> Mapping[str, tuple[str, ...]]:
    """Return the nodes that an engine must not give to each task: those of its spec, and those with too many failures."""
    # The name of an allocated node is `<host>@<allocation>`, and each attempt gets a new allocation.
    failures = Counter((cause.node or "").partition("@")[0] for cause in group.earlier_causes)
    avoided = tuple(name for name, count in failures.items() if name and 0 < plan.retry.avoid_after <= count)
    return {one.task: found for one in demands(plan) if (found := (*one.nodes_excluded, *avoided))}


def _venvs(plan: GroupPlan, nodes: Mapping[str, str], pool: Pool) -> Mapping[str, str]:
    """Return the digest of the Python environment of each task that has one."""
    if plan.venv is None:
        return {}
    found = {launch.task: venv_of(plan, launch, pool.node(nodes[launch.task])) for launch in plan.launches}
    return {task: digest for task, digest in found.items() if digest is not None}


def _wait_message(views: Sequence[NodeView], unplaced: Sequence[Unplaced]) -> str:
    down = [f"{view.node.name}: {view.error}" for view in views if not view.up and view.error]
    connecting = [view.node.name for view in views if not view.up and not view.error]
    message = [f"connecting to {few(connecting, ', ')}"] if connecting else []
    # Errors come last: some have a remedy of several lines.
    if len(down) == len(views):
        return "no node can be reached: " + few(down, "; ")
    if any(view.up for view in views):
        message = [*filter(None, [_no_room_message(unplaced)]), *message]
    return "; ".join([*message, *([f"unreachable: {few(down, '; ')}"] if down else [])])


_HOLDING = (State.INITIALIZING, State.RUNNING, State.STOPPING)
_NOTHING = (0, 0, 0)


def pool_usage(workflow: StoredWorkflow) -> PoolUsage:
    """Return the groups of a workflow that wait for nodes, and the resources that it holds."""
    groups = workflow.record.groups
    waits = workflow.record.cancel is None
    return PoolUsage(
        workflow=workflow,
        waiting=tuple(group for group in groups if waits and group.state is State.SCHEDULING and not group.venv_builds),
        holds=tuple(
            hold
            for group in groups
            for hold in (
                *(_holds(group, workflow.plan.group(group.name)) if group.state in _HOLDING else ()),
                *(
                    HeldResources(node=task.node, is_orphan=True)
                    for task in group.attempts
                    if task.orphan is not None and task.node
                ),
            )
        ),
    )


def _holds(group: GroupRecord, plan: GroupPlan) -> Iterator[HeldResources]:
    if group.binding is None:
        return
    if group.binding.port is not None:
        yield HeldResources(node=group.binding.tasks[plan.master].node, port=group.binding.port)
    by_task = {demand.task: demand for demand in demands(plan)}
    for task in group.tasks:
        if task.node is not None and not task.state.is_final:
            demand = by_task[task.name]
            yield HeldResources(node=task.node, gpus=demand.gpus, cpus=demand.cpus, memory=demand.memory)


def free(views: Sequence[NodeView], usages: Sequence[PoolUsage], fixed_port: int | None) -> list[Free]:
    """Return the free resources of each reachable node of a pool, given the usage of each workflow of that pool.

    A node is closed if ``fixed_port`` is in use there, or if an orphan must first be stopped there. If several
    entries of the pool are one machine, its resources count once.
    """
    first = _first_entries(views)
    used: dict[str, tuple[int, int, int]] = {}
    closed: dict[str, str] = {}
    for usage in usages:
        for hold in usage.holds:
            machine = first.get(hold.node, hold.node)
            gpus, cpus, memory = used.get(machine, _NOTHING)
            used[machine] = (gpus + hold.gpus, cpus + hold.cpus, memory + hold.memory)
            if fixed_port is not None and hold.port == fixed_port:
                closed[machine] = f"port {fixed_port} is taken"
            if hold.is_orphan:
                closed[machine] = "an earlier attempt is being stopped there"
    touched = first.keys() | used.keys() | closed.keys()
    # Most nodes of a large pool are idle, and `NodeView.whole` already has their resources.
    return [
        view.whole if view.node.name not in touched else _remaining_of(
            _whole(view, first), used.get(view.node.name), closed.get(first.get(view.node.name, view.node.name), "")
        )
        for view in views
        if view.up
    ]  # fmt: skip


def capacity(views: Sequence[NodeView]) -> list[Free]:
    """Return the resources of a pool's nodes if all were reachable and idle, as far as they are known."""
    first = _first_entries(views)
    return [_whole(view, first) for view in views]


def _first_entries(views: Sequence[NodeView]) -> dict[str, str]:
    """For a machine with several entries, map each to the first reachable entry, or else to the first."""
    entries: dict[str, list[NodeView]] = {}
    for view in views:
        if view.lease_directory_id:
            entries.setdefault(view.lease_directory_id, []).append(view)
    return {
        view.node.name: next((one for one in same if one.up), same[0]).node.name
        for same in entries.values()
        if len(same) > 1
        for view in same
    }


def _whole(view: NodeView, first: Mapping[str, str]) -> Free:
    """Return the resources of an idle node: zero if another entry of the same machine has them."""
    owner, whole = first.get(view.node.name), view.whole
    if owner is None or owner == view.node.name:
        return whole
    return replace(
        whole, gpus=_zero(whole.gpus), cpus=_zero(whole.cpus), memory=_zero(whole.memory), all_gpus=_zero(whole.all_gpus),
        all_cpus=_zero(whole.all_cpus), all_memory=_zero(whole.all_memory),
        note=f"on the same machine as {owner}, or with the same lease_dir",
    )  # fmt: skip


def _zero(capacity: int | None) -> int | None:
    """Return zero, or ``None`` if the capacity is not known."""
    return None if capacity is None else 0


def _remaining_of(whole: Free, used: tuple[int, int, int] | None, closed: str) -> Free:
    if used is None and not closed:
        return whole
    gpus, cpus, memory = used or _NOTHING
    available = (_remaining(whole.gpus, gpus), _remaining(whole.cpus, cpus), _remaining(whole.memory, memory))
    return replace(whole, gpus=available[0], cpus=available[1], memory=available[2], closed=closed)


def _remaining(capacity: int | None, used: int) -> int | None:
    return None if capacity is None else max(0, capacity - used)
