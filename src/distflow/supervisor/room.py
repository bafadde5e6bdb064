"""Resources that gangs hold on their nodes, and the free resources. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from distflow.layout.placement.node_placement import Free
from distflow.lifecycle.states import State
from distflow.plan.compile import demands
from distflow.plan.model import GroupPlan
from distflow.state.record import GroupRecord
from distflow.supervisor.world import Hold, NodeView, Share, Workflow

__all__ = ["capacity", "free", "share_of"]

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
