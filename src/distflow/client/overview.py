"""Read the unfinished workflows and the GPUs of the pools, with the latest use of resources. No node is contacted."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

from msgspec import Struct

from distflow.client.client import Client
from distflow.client.pools import list_nodes
from distflow.client.workflows import WorkflowStatus, read_status
from distflow.state.logs import LogSource
from distflow.state.samples import last_samples

if TYPE_CHECKING:
    from distflow.state.record import TaskRecord, WorkflowRecord

__all__ = ["GpuState", "NodeState", "Overview", "read_overview"]


class GpuState(Struct, frozen=True, kw_only=True):
    """One GPU of a node."""

    index: int
    task: str | None
    """The task that uses it, such as ``digits-3/worker``; ``None`` if none of this user's tasks does."""
    values: Mapping[str, float]
    """The latest recorded values, such as ``utilization`` and ``power``; empty if unknown."""


class NodeState(Struct, frozen=True, kw_only=True):
    """A node of a pool, and its GPUs."""

    pool: str
    node: str
    gpus: tuple[GpuState, ...]
    tasks: tuple[str, ...]
    """This user's tasks on the node."""


class Overview(Struct, frozen=True, kw_only=True):
    """The unfinished workflows of this user, and the nodes of the pools."""

    workflows: tuple[tuple[WorkflowRecord, WorkflowStatus], ...]
    """The oldest first."""
    nodes: tuple[NodeState, ...]


def read_overview(client: Client, pools: Collection[str] = ()) -> Overview:
    """Return the unfinished workflows of this user, and the nodes with their GPUs. Starts a supervisor if none is running.

    Args:
        client: The client whose store has the workflows and whose configuration has the pools.
        pools: Names of pools. Default: all pools.

    Raises:
        NotFound: if a pool does not exist.
        ProblemsFound: if the configuration is wrong.

    """
    configured = list_nodes(client, [*pools], all_pools=not pools)
    records = sorted(client.store.unfinished(), key=lambda one: one.submitted_at)
    client.wake()
    shown = [record for record in records if not pools or record.pool in pools]
    counts: dict[tuple[str, str], int] = {(one.pool.name, one.node.name): one.node.gpus or 0 for one in configured}
    gpus: dict[tuple[str, str], dict[int, GpuState]] = {}
    tasks: dict[tuple[str, str], list[str]] = {}
    for record in shown:
        for group in record.groups:
            for task in group.tasks:
                if task.node is None or task.state.is_final or task.started_at is None:
                    continue
                place = record.pool, task.node
                counts.setdefault(place, 0)
                tasks.setdefault(place, []).append(f"{record.id}/{task.name}")
                gpus.setdefault(place, {}).update(_gpus_of(client, record, group.name, task))
    return Overview(
        workflows=tuple((record, read_status(client, record)) for record in shown),
        nodes=tuple(
            NodeState(
                pool=pool,
                node=node,
                gpus=tuple(
                    gpus.get((pool, node), {}).get(index) or GpuState(index=index, task=None, values={})
                    for index in range(max(count, *(number + 1 for number in gpus.get((pool, node), {})), 0))
                ),
                tasks=tuple(tasks.get((pool, node), ())),
            )
            for (pool, node), count in counts.items()
        ),
    )


def _gpus_of(client: Client, record: WorkflowRecord, group: str, task: TaskRecord) -> Mapping[int, GpuState]:
    if not task.gpu_ids:
        return {}
    samples = last_samples(
        LogSource(task.name, task.attempt, client.mirror.folder(record.uuid, group, task.name, task.attempt)), most=1
    )
    latest = {} if samples is None else {**samples.limits, **samples.latest()}
    found = {}
    for index in task.gpu_ids:
        prefix = f"system/gpu{index}/"
        values = {name.removeprefix(prefix): value for name, value in latest.items() if name.startswith(prefix)}
        found[index] = GpuState(index=index, task=f"{record.id}/{task.name}", values=values)
    return found
