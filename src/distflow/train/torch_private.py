"""The names that torch does not declare public, as torch 2.13 has them. Only this module uses them.

Tests in ``tests/train`` call these functions, and fail for most names that a new torch changes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d
from torch.distributed import distributed_c10d
from torch.utils.data import get_worker_info

__all__ = ["has_ring_attention", "named_groups", "recorded_collectives", "set_worker_dataset"]

_DUMPS = ("_dump_fr_trace_json", "_dump_nccl_trace_json")
"""The function of each flight recorder; a torch without NCCL has only the first."""


def recorded_collectives() -> list[Mapping[str, Any]]:
    """Return the entries of torch's flight recorders, in the format of ``FlightRecorderDetail.hpp``."""
    dumps = [recorded() for name in _DUMPS if (recorded := getattr(_distributed_c10d, name, None)) is not None]
    return [entry for dump in dumps for entry in json.loads(dump).get("entries") or ()]


def named_groups() -> Sequence[tuple[str, dist.ProcessGroup, Sequence[int]]]:
    """Return the name, the group and the global ranks of each process group that this rank is in."""
    known = distributed_c10d._world  # noqa: SLF001  nothing else lists the groups
    return [(name, group, sorted(known.pg_group_ranks.get(group, ()))) for group, name in list(known.pg_names.items())]


def has_ring_attention(device: str) -> bool:
    """Return whether torch's context parallelism can compute attention on a device such as ``cpu``."""
    if device != "cpu":
        return True
    from torch.distributed.tensor.experimental import _context_parallel  # noqa: PLC0415  it takes a second to import

    kernels = _context_parallel._attention.custom_ops  # noqa: SLF001  nothing else lists the supported kernels
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default in kernels  # noqa: SLF001


def set_worker_dataset(dataset: Any) -> None:
    """Let ``get_worker_info`` in a loader's worker answer with this dataset. torch's ``WorkerInfo`` is frozen."""
    if (info := get_worker_info()) is not None:
        object.__setattr__(info, "dataset", dataset)
