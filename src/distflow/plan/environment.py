"""The environment of a task: the variables with which torch, NCCL, gloo and torchrun form exactly the world of the spec.

Names and meaning are torch's (``torch.distributed.run``, environment variables of the launcher; ``env://``
initialization) and NCCL's (``NCCL_SOCKET_IFNAME``). ``PET_*`` are the defaults of torchrun's options, so
``torchrun train.py`` without options joins the right world with the right rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from distflow.layout.ranks import TaskRanks, WorldLayout
from distflow.spec.model import ResourceSpec

__all__ = ["DEBUG_VARIABLES", "task_environment"]

DEBUG_VARIABLES: Mapping[str, str] = MappingProxyType(
    {
        "DISTFLOW_DEBUG": "1",
        # torch compares the shapes and kinds of collectives before they run. A mismatch is then an error, not a hang.
        "TORCH_DISTRIBUTED_DEBUG": "DETAIL",
        # The flight recorder: the last collectives of each rank, written when one of them times out.
        "TORCH_FR_BUFFER_SIZE": "2000",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "TORCH_FR_DUMP_TEMP_FILE": "@@ATTEMPT_DIR@@/output/nccl_trace_rank_",
    }
)
"""The variables of ``debug: true``. Source: torch 2.13, ``docs/source/distributed.md`` and ``torch/csrc/distributed/c10d``."""


def task_environment(
    *,
    group: str,
    task: str,
    ranks: TaskRanks | None,
    world: WorldLayout | None,
    resource: ResourceSpec,
    given: Mapping[str, str],
    debug: bool = False,
    checkpoint: str | None = None,
) -> dict[str, str]:
    """Return the variables of one task. Those in ``given`` (of the spec, its framework and its strategy) override the others.

    RANK, LOCAL_RANK, LOCAL_WORLD_SIZE and WORLD_SIZE are set only for a task of one rank. Otherwise ``python train.py`` in a
    task of eight ranks would join the world as one process, and all processes would wait for the other seven. ``checkpoint`` is
    the path of the task's first checkpoint, relative to the attempt's directory.
    """
    environment = {
        "DISTFLOW_WORKFLOW_ID": "@@WORKFLOW_ID@@",
        "DISTFLOW_GROUP": group,
        "DISTFLOW_TASK": task,
        "DISTFLOW_NODE": "@@NODE@@",
        "DISTFLOW_RETRY_ID": "@@RETRY_ID@@",
        "DISTFLOW_OUTPUT": "@@ATTEMPT_DIR@@/output",
        "PYTHONUNBUFFERED": "1",
    }
    if checkpoint is not None:
        environment["DISTFLOW_CHECKPOINT"] = f"@@ATTEMPT_DIR@@/{checkpoint}"
    if resource.gpu is not None:
        environment["CUDA_VISIBLE_DEVICES"] = "@@GPU_IDS@@"
    if ranks is not None and world is not None:
        environment |= _world_environment(ranks, world)
    if resource.cpu is not None or ranks is not None:
        # torchrun sets this variable to 1 if it starts several processes. distflow divides the requested CPUs among the ranks.
        environment["OMP_NUM_THREADS"] = str(max(1, (resource.cpu or 1) // (ranks.size if ranks else 1)))
    return environment | (dict(DEBUG_VARIABLES) if debug else {}) | dict(given)


def _world_environment(ranks: TaskRanks, world: WorldLayout) -> dict[str, str]:
    nodes = str(len(world.tasks))
    environment = {
        "MASTER_ADDR": "@@MASTER_ADDR@@",
        "MASTER_PORT": "@@MASTER_PORT@@",
        "NODE_RANK": str(ranks.node_rank),
        "NNODES": nodes,
        "PET_NNODES": nodes,
        "PET_NODE_RANK": str(ranks.node_rank),
        "PET_NPROC_PER_NODE": str(ranks.size),
        "PET_MASTER_ADDR": "@@MASTER_ADDR@@",
        "PET_MASTER_PORT": "@@MASTER_PORT@@",
        "DISTFLOW_RANK_OFFSET": str(ranks.offset),
        "DISTFLOW_RANK_SIZE": str(ranks.size),
        "DISTFLOW_WORLD_SIZE": str(world.world_size),
        "NCCL_SOCKET_IFNAME": "@@IFNAME@@",
        "GLOO_SOCKET_IFNAME": "@@IFNAME@@",
        "TP_SOCKET_IFNAME": "@@IFNAME@@",
    }
    if ranks.size == 1:
        environment |= {
            "RANK": str(ranks.offset),
            "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": "1",
            "WORLD_SIZE": str(world.world_size),
        }
    return environment
