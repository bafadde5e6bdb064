"""The whole model's state from its shards, for files that other programs read."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from distflow.train.strategies.stages import Pipeline

__all__ = ["full_state_dict"]


def full_state_dict(model: nn.Module) -> dict[str, Any]:
    """Return the whole model's parameters on rank 0's CPU, under their plain names (FSDP's FULL_STATE_DICT); else nothing.

    All ranks must call it. Of a pipeline each rank returns its own stage: no rank ever holds the whole.
    """
    if isinstance(model, Pipeline):
        return {name: tensor.detach().cpu() for name, tensor in model.part.state_dict().items()}
    return dict(get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True)))
