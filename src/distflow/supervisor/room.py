"""What gangs hold of their nodes, and what is left there. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from distflow.layout.placement import Free
from distflow.lifecycle.states import State
from distflow.plan.compile import demands
from distflow.plan.model import GroupPlan
from distflow.state.record import GroupRecord
from distflow.supervisor.world import Hold, NodeView, Share, Workflow

__all__ = ["free", "share_of"]

_HOLDING = (State.INITIALIZING, State.RUNNING, State.STOPPING)
_NOTHING = (0, 0, 0)


def share_of(workflow: Workflow) -> Share:
    """Return what a workflow waits for and holds."""
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
    """Return what each reachable node of a pool has left, beside what the shares of that pool hold.

    Closed are those where ``fixed_port`` is taken, and those where an attempt is that was given up: it is stopped first.
    """
    used: dict[str, tuple[int, int, int]] = {}
    closed: dict[str, str] = {}
    for share in shares:
        for hold in share.holds:
            gpus, cpus, memory = used.get(hold.node, _NOTHING)
            used[hold.node] = (gpus + hold.gpus, cpus + hold.cpus, memory + hold.memory)
            if fixed_port is not None and hold.port == fixed_port:
                closed[hold.node] = f"port {fixed_port} is taken"
            if hold.is_stray:
                closed[hold.node] = "an earlier attempt is being stopped there"
    return [_beside(view.whole, used.get(view.node.name), closed.get(view.node.name, "")) for view in views if view.up]


def _beside(whole: Free, used: tuple[int, int, int] | None, closed: str) -> Free:
    if used is None:
        return whole
    gpus, cpus, memory = used
    left = (_left(whole.gpus, gpus), _left(whole.cpus, cpus), _left(whole.memory, memory))
    return replace(whole, gpus=left[0], cpus=left[1], memory=left[2], closed=closed)


def _left(capacity: int | None, used: int) -> int | None:
    return None if capacity is None else max(0, capacity - used)
