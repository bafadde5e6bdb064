"""Sharded data parallelism: torch's FSDP2 (``fully_shard``), under the names of FSDP's sharding strategies.

FULL_SHARD gathers a layer's parameters when they are needed and drops them again; SHARD_GRAD_OP keeps them from the forward
to the backward pass; HYBRID_SHARD shards inside each row of a mesh and replicates between the rows. NO_SHARD is DDP
(``build.replicate``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

from distflow.train.strategies.build import large_modules

__all__ = ["shard"]

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def shard(model: nn.Module, mesh: DeviceMesh, options: Mapping[str, Any], layers: Sequence[nn.Module]) -> None:
    """Shard the model over the axis ``fsdp`` of a mesh, in place. If the mesh also has ``dp``, replicate the shards over it.

    ``layers`` are sharded separately, unless ``auto_wrap_policy`` is ``size`` or ``none``.
    """
    settings: dict[str, Any] = {
        "mesh": mesh,
        "mp_policy": MixedPrecisionPolicy(
            param_dtype=_DTYPES.get(options.get("mixed_precision", "none")),
            reduce_dtype=_DTYPES.get(options.get("reduce_dtype", "")),
        ),
    }
    if options.get("sharding_strategy") == "SHARD_GRAD_OP":
        settings["reshard_after_forward"] = False
    if options.get("cpu_offload"):
        settings["offload_policy"] = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda")
    policy = options.get("auto_wrap_policy", "transformer_layer")
    if policy == "size":
        parts = large_modules(model, **({"min_parameters": options["min_num_params"]} if "min_num_params" in options else {}))
    else:
        # Inner modules first: a module of one named class may contain modules of another.
        parts = [] if policy == "none" else list(layers)[::-1]
    for part in parts:
        fully_shard(part, **settings)
    fully_shard(model, **settings)
