"""Which waiting gang may lease nodes now, and which resources are free. Pure.

Gangs of one pool are ordered by priority, then by submission. A gang gets all of its nodes or none. A smaller gang never
overtakes one that waits for nodes, so that a large gang is never starved. A gang that has nodes keeps them. Only one gang per
pool asks the nodes at a time, so two gangs never hold half of what both need.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from distflow.backends.base import LeaseRequest
from distflow.documents.text import few
from distflow.layout.placement import Demand, Free, Placement, Unplaced, place_near
from distflow.lifecycle.states import State
from distflow.plan.compile import demands
from distflow.plan.model import GroupPlan
from distflow.pools.model import Pool
from distflow.state.record import GroupRecord, WorkflowRecord
from distflow.supervisor.commands import Lease
from distflow.supervisor.snapshot import Hold, NodeView, Share, Workflow, World

__all__ = ["Leases", "capacity", "free", "next_leases", "share_of"]


_LEASE_OUTLIVES_S = 15.0
"""Seconds that nodes hold a lease longer than the start barrier, because the supervisor decides about a late gang. If a node
gave up at the same moment, it would seem to have lost its lease, and the gang would start again."""


@dataclass(slots=True, kw_only=True)
class Leases:
    """The queue's decision."""

    commands: list[Lease] = field(default_factory=list)
    messages: dict[tuple[str, str], str] = field(default_factory=dict)
    """What each waiting group waits for, by workflow (uuid) and group."""
    failures: dict[tuple[str, str], str] = field(default_factory=dict)
    """Why a group can never have its nodes, by workflow (uuid) and group."""
    wake_at: float | None = None

    def wake(self, at: Sequence[float]) -> None:
        """Decide again at the earliest of these times."""
        self.wake_at = min([*at, *([] if self.wake_at is None else [self.wake_at])], default=None)


def next_leases(world: World, shares: Iterable[Share], now: float) -> Leases:
    """Return the lease commands of the gangs whose turn it is, and the reasons why the others wait.

    ``shares`` are those of all workflows, in the order of their submission.
    """
    leases = Leases()
    by_pool: dict[str, list[Share]] = {}
    for share in shares:
        by_pool.setdefault(share.workflow.record.pool_key, []).append(share)
    asking = {one.workflow for one in world.in_flight if one.kind is Lease}
    for pool_key, pool in world.pools.items():
        of_pool = by_pool.get(pool_key, [])
        waiting = [(share.workflow, group) for share in of_pool for group in share.waiting]
        resting = [group.resting_until for _, group in waiting if now < group.resting_until]
        leases.wake(resting)
        waiting = [one for one in waiting if now >= one[1].resting_until]
        # The sort is stable: workflows of one priority stay in the order of submission.
        waiting.sort(key=lambda one: one[0].record.priority.turn)
        if waiting and not any(share.workflow.record.uuid in asking for share in (of_pool if asking else ())):
            _next_of_pool(world, pool_key, pool, of_pool, waiting, now, leases)
    return leases


def _next_of_pool(
    world: World,
    pool_key: str,
    pool: Pool,
    shares: Sequence[Share],
    waiting: Sequence[tuple[Workflow, GroupRecord]],
    now: float,
    leases: Leases,
) -> None:
    views = [world.nodes[pool_key, node.name] for node in pool.nodes]
    workflow, group = waiting[0]
    # Name the gang directly before it. The head of the queue changes often, and each new message is an event for all others.
    for (before, _), (other, later) in pairwise(waiting):
        leases.messages[other.record.uuid, later.name] = f"behind {before.record.id}"
    plan = workflow.plan.group(group.name)
    left, bad, is_connecting = _usable(plan, group, views, shares, shared=pool.shares_nodes)
    spread = 1 if pool.shares_nodes else sum(launch.ranks is not None for launch in plan.launches)
    if len(left) < spread and is_connecting:
        if any(not view.up and view.error for view in views):
            leases.messages[workflow.record.uuid, group.name] = _wait_words(views, ())
        return
    # Nodes that refused are not asked again for a while; other suitable nodes are asked meanwhile.
    refused = {one.node: one.until for one in group.refusals if now < one.until}
    willing = [one for one in left if one.node not in refused]
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
    if refused and isinstance(place_near(demands(sizes[-1]), left, shared=pool.shares_nodes), Placement):
        leases.wake(list(refused.values()))
    elif group.attempt == 0 and (never := _never(plan, views, pool)):
        leases.failures[workflow.record.uuid, group.name] = (
            f"pool {workflow.record.pool} cannot run it, even when idle: {never}"
        )
    elif any(view.up or view.error for view in views):  # otherwise the first connections are still being made
        words = _wait_words(views, unplaced)
        words += f"; avoided, as attempts failed there: {few(sorted(bad), ', ')}" if bad else ""
        leases.messages[workflow.record.uuid, group.name] = words


def _never(plan: GroupPlan, views: Sequence[NodeView], pool: Pool) -> str:
    """Return why the idle pool could not hold a gang; empty if it could, as far as is known."""
    placed = place_near(demands(plan.sizes[-1]), capacity(views), shared=pool.shares_nodes)
    return "" if isinstance(placed, Placement) else _no_room(placed)


def _no_room(unplaced: Sequence[Unplaced]) -> str:
    return "; ".join(f"no room for {one.task}: {few(one.reasons, ', ')}" for one in unplaced[:1])


def _sizes(plan: GroupPlan, group: GroupRecord, now: float, leases: Leases) -> Sequence[GroupPlan]:
    """Return the sizes at which a gang may start now: its full size, and after a while smaller ones if its spec allows them."""
    patient_until = (group.scheduling_at or now) + plan.smaller_after_s
    if plan.smaller and now < patient_until:
        leases.wake([patient_until])
        return (plan,)
    return plan.sizes


def _usable(
    plan: GroupPlan, group: GroupRecord, views: Sequence[NodeView], shares: Sequence[Share], *, shared: bool
) -> tuple[list[Free], frozenset[str], bool]:
    """Return the free resources of usable nodes, the nodes to avoid, and whether some nodes are still being connected to."""
    # Nodes on which earlier attempts failed come last, so they are used only if there are no others.
    failures = Counter(cause.node for cause in group.earlier_causes)
    left = free(views, shares, plan.world.port if plan.world else None)
    if failures:
        left.sort(key=lambda one: failures[one.node])
    bad = frozenset(name for name, count in failures.items() if name and 0 < plan.retry.avoid_after <= count)
    # While the first connections are being made, nothing is known about those nodes.
    is_connecting = any(not view.up and not view.error for view in views)
    if bad and (is_connecting or _could_do_without(bad, left, demands(plan.sizes[-1]), shared=shared)):
        return [one for one in left if one.node not in bad], bad, is_connecting
    return left, frozenset(), is_connecting


def _could_do_without(bad: frozenset[str], left: Sequence[Free], asked: Sequence[Demand], *, shared: bool) -> bool:
    """Return whether a gang would find room on the other nodes if they were idle."""
    empty = [
        replace(one, gpus=one.all_gpus, cpus=one.all_cpus, memory=one.all_memory, closed="")
        for one in left
        if one.node not in bad
    ]
    return isinstance(place_near(asked, empty, shared=shared), Placement)


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
    )


def _wait_words(views: Sequence[NodeView], unplaced: Sequence[Unplaced]) -> str:
    down = [f"{view.node.name}: {view.error}" for view in views if not view.up and view.error]
    connecting = [view.node.name for view in views if not view.up and not view.error]
    words = [f"connecting to {few(connecting, ', ')}"] if connecting else []
    # Errors come last: some have a remedy of several lines.
    if len(down) == len(views):
        return "no node can be reached: " + few(down, "; ")
    if any(view.up for view in views):
        words = [*filter(None, [_no_room(unplaced)]), *words]
    return "; ".join([*words, *([f"unreachable: {few(down, '; ')}"] if down else [])])


_HOLDING = (State.INITIALIZING, State.RUNNING, State.STOPPING)
_NOTHING = (0, 0, 0)


def share_of(workflow: Workflow) -> Share:
    """Return the groups of a workflow that wait for nodes, and the resources that it holds."""
    groups = workflow.record.groups
    waits = workflow.record.cancel is None
    return Share(
        workflow=workflow,
        waiting=tuple(group for group in groups if waits and group.state is State.SCHEDULING),
        holds=tuple(
            hold
            for group in groups
            for hold in (
                *(_holds(group, workflow.plan.group(group.name)) if group.state in _HOLDING else ()),
                *(Hold(node=task.node, is_stray=True) for task in group.attempts if task.stray is not None and task.node),
            )
        ),
    )


def _holds(group: GroupRecord, plan: GroupPlan) -> Iterator[Hold]:
    if group.binding is None:
        return
    if group.binding.port is not None:
        yield Hold(node=group.binding.tasks[plan.master].node, port=group.binding.port)
    by_task = {demand.task: demand for demand in demands(plan)}
    for task in group.tasks:
        if task.node is not None and not task.state.is_final:
            asked = by_task[task.name]
            yield Hold(node=task.node, gpus=asked.gpus, cpus=asked.cpus, memory=asked.memory)


def free(views: Sequence[NodeView], shares: Sequence[Share], fixed_port: int | None) -> list[Free]:
    """Return the free resources of each reachable node of a pool, given the shares of that pool.

    A node is closed if ``fixed_port`` is in use there, or if an abandoned attempt must first be stopped there. If several
    entries of the pool are one machine, its resources count once.
    """
    first = _first_entries(views)
    used: dict[str, tuple[int, int, int]] = {}
    closed: dict[str, str] = {}
    for share in shares:
        for hold in share.holds:
            machine = first.get(hold.node, hold.node)
            gpus, cpus, memory = used.get(machine, _NOTHING)
            used[machine] = (gpus + hold.gpus, cpus + hold.cpus, memory + hold.memory)
            if fixed_port is not None and hold.port == fixed_port:
                closed[machine] = f"port {fixed_port} is taken"
            if hold.is_stray:
                closed[machine] = "an earlier attempt is being stopped there"
    touched = first.keys() | used.keys() | closed.keys()
    # Most nodes of a large pool are idle, and their view has the answer already.
    return [
        view.whole if view.node.name not in touched
        else _left_of(_whole(view, first), used.get(view.node.name), closed.get(first.get(view.node.name, view.node.name), ""))
        for view in views
        if view.up
    ]  # fmt: skip


def capacity(views: Sequence[NodeView]) -> list[Free]:
    """Return the resources of a pool's nodes if all were reachable and idle, as far as they are known."""
    first = _first_entries(views)
    return [_whole(view, first) for view in views]


def _first_entries(views: Sequence[NodeView]) -> dict[str, str]:
    """Map all entries of a machine that has several to the first one, preferring one that can be reached."""
    entries: dict[str, list[NodeView]] = {}
    for view in views:
        if view.machine:
            entries.setdefault(view.machine, []).append(view)
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
        whole, gpus=_none(whole.gpus), cpus=_none(whole.cpus), memory=_none(whole.memory), all_gpus=_none(whole.all_gpus),
        all_cpus=_none(whole.all_cpus), all_memory=_none(whole.all_memory),
        note=f"the same machine as {owner}, or it shares its lease_dir",
    )  # fmt: skip


def _none(capacity: int | None) -> int | None:
    return None if capacity is None else 0


def _left_of(whole: Free, used: tuple[int, int, int] | None, closed: str) -> Free:
    if used is None and not closed:
        return whole
    gpus, cpus, memory = used or _NOTHING
    left = (_left(whole.gpus, gpus), _left(whole.cpus, cpus), _left(whole.memory, memory))
    return replace(whole, gpus=left[0], cpus=left[1], memory=left[2], closed=closed)


def _left(capacity: int | None, used: int) -> int | None:
    return None if capacity is None else max(0, capacity - used)
