"""Clipping gradients by the norm of the whole model's gradient, whichever part of it a rank holds.

torch's ``clip_grad_norm_`` refuses models that hold tensors of several meshes (tensor parallelism, hybrids), and of a pipeline
it would see one stage only.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement

from distflow.train.strategies.stages import Pipeline

__all__ = ["clip_gradients"]


def clip_gradients(model: nn.Module, max_norm: float) -> torch.Tensor:
    """Scale the gradients so that their norm over the whole model is at most ``max_norm``; return the norm before.

    All ranks must call it, after the gradients are reduced, and get the same norm. Raises ``ValueError`` for a norm below 0.
    """
    if not max_norm >= 0:
        raise ValueError(f"max_norm={max_norm}: give 0 or more")
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    norm = _squares(gradients).sqrt() if not isinstance(model, Pipeline) else model.over_stages(_squares(gradients)).sqrt()
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for gradient in gradients:
        local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
        local.mul_(factor.to(device=local.device, dtype=local.dtype))
    return norm


def _squares(gradients: Iterable[torch.Tensor]) -> torch.Tensor:
    """Return the sum of the squares of whole gradients, in float32; one reduction for each way in which they are cut."""
    whole: list[torch.Tensor] = []
    cut: dict[tuple[DeviceMesh, tuple[Placement, ...]], list[torch.Tensor]] = defaultdict(list)
    for gradient in gradients:
        if isinstance(gradient, DTensor):
            if any(isinstance(placement, Partial) for placement in gradient.placements):
                whole.append(gradient.full_tensor())
            else:
                cut[gradient.device_mesh, tuple(gradient.placements)].append(gradient.to_local())
        else:
            whole.append(gradient)
    total = _sum(whole)
    for (mesh, placements), parts in cut.items():
        squares = _sum(parts)
        for axis, placement in enumerate(placements):
            if not placement.is_replicate():
                dist.all_reduce(squares, group=mesh.get_group(axis))
        total = total.to(squares.device) + squares
    return total


def _sum(tensors: list[torch.Tensor]) -> torch.Tensor:
    squares = [tensor.detach().float().square().sum() for tensor in tensors]
    return torch.stack(squares).sum() if squares else torch.zeros(())
