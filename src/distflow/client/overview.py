"""Read the unfinished workflows and the GPUs of the pools, with the latest use of resources."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

from msgspec import Struct

from distflow.client.client import Client, user_name
from distflow.client.pools import list_nodes
from distflow.client.workflows import WorkflowActivity, read_status
from distflow.state.logs import LogSource
from distflow.state.samples import last_samples
from distflow.structs import replace

if TYPE_CHECKING:
    from distflow.client.nodes import GpuUse, Holders
    from distflow.state.record import TaskRecord, WorkflowRecord

__all__ = ["GpuState", "NodeState", "Overview", "read_overview"]


class GpuState(Struct, frozen=True, kw_only=True):
    """One GPU of a node."""

    index: int
    task: str | None
    """The task of this store that uses it, such as ``digits-3/worker``, or ``None``."""
    state: str | None = None
    """``free``, or the state of its use (see ``GpuUse``). ``None`` if ``task`` is ``None`` and the node has not answered."""
    by: str = ""
    """The task or process that uses it, as the node reports it; empty if ``task`` is set, or if it is free or unknown."""
    values: Mapping[str, float]
    """The latest recorded values, such as ``utilization`` and ``power``; empty if unknown."""


class NodeState(Struct, frozen=True, kw_only=True):
    """A node of a pool, and its GPUs."""

    pool: str
    node: str
    gpus: tuple[GpuState, ...]
    tasks: tuple[str, ...]
    """This user's tasks on the node."""
    error: str = ""
    """Why the node did not answer; empty if it answered or was not queried."""


class Overview(Struct, frozen=True, kw_only=True):
    """The unfinished workflows of this user, and the nodes of the pools."""

    workflows: tuple[tuple[WorkflowRecord, WorkflowActivity], ...]
    """The oldest first. An ended workflow is included until its logs are complete and none of its tasks remains on a node."""
    nodes: tuple[NodeState, ...]


def read_overview(
    client: Client, pools: Collection[str] = (), answers: Mapping[tuple[str, str], Holders] | None = None
) -> Overview:
    """Return the unfinished workflows of this user, and the nodes with their GPUs.

    Start a supervisor in the background if there is unfinished work and no supervisor is running. This function itself does
    not connect to nodes.

    Args:
        client: The client whose store has the workflows and whose configuration has the pools.
        pools: Names of pools. Default: all pools.
        answers: The answers of nodes (see ``ask_resource_holders``), by the names of pool and node.

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
                key = record.pool, task.node
                counts.setdefault(key, 0)
                tasks.setdefault(key, []).append(f"{record.id}/{task.name}")
                gpus.setdefault(key, {}).update(_gpus_of(client, record, group.name, task))
    uses = _uses(client, answers or {})
    return Overview(
        workflows=tuple((record, read_status(client, record)) for record in shown),
        nodes=tuple(
            NodeState(
                pool=pool,
                node=node,
                gpus=_gpus(count, gpus.get((pool, node), {}), uses.get((pool, node))),
                tasks=tuple(tasks.get((pool, node), ())),
                error=answers[pool, node].error if answers and (pool, node) in answers else "",
            )
            for (pool, node), count in counts.items()
        ),
    )


def _uses(client: Client, answers: Mapping[tuple[str, str], Holders]) -> dict[tuple[str, str], dict[int, GpuUse]]:
    """Return the use of the GPUs of each node that answered."""
    if not answers:
        return {}
    from distflow.client.nodes import gpu_uses

    ids = client.store.ids()
    return {key: gpu_uses(answer, ids, user_name()) for key, answer in answers.items() if not answer.error}


def _gpus(count: int, own: Mapping[int, GpuState], uses: Mapping[int, GpuUse] | None) -> tuple[GpuState, ...]:
    found = []
    for index in range(max(count, *(number + 1 for number in (*own, *(uses or ()))), 0)):
        use = (uses or {}).get(index)
        if (state := own.get(index)) is not None:
            found.append(replace(state, state="mine"))
        elif uses is None:
            found.append(GpuState(index=index, task=None, values={}))
        else:
            by = {"state": "free"} if use is None else {"state": use.state, "by": use.by}
            found.append(GpuState(index=index, task=None, values={}, **by))
    return tuple(found)


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
