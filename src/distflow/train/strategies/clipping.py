"""Clip gradients by their norm over the whole model, of which a rank may hold only a part.

torch's ``clip_grad_norm_`` refuses gradients on different meshes (``hybrid``), and DTensors together with plain tensors
(``tp``). In a pipeline, it would cover only one stage.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from distflow.train.strategies.stages import Pipeline

__all__ = ["clip_gradients"]


def clip_gradients(model: nn.Module, max_norm: float) -> torch.Tensor:
    """Implement ``ParallelPlan.clip_gradients``."""
    if not max_norm >= 0:
        raise ValueError(f"max_norm is {max_norm}, but it must be at least 0")
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    squares = _sum_of_squares(gradients)
    norm = (model.sum_over_stages(squares) if isinstance(model, Pipeline) else squares).sqrt()
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for gradient in gradients:
        local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
        local.mul_(factor.to(device=local.device, dtype=local.dtype))
    return norm


def _sum_of_squares(gradients: Iterable[torch.Tensor]) -> torch.Tensor:
    """Return the sum of squares over the whole gradients, in float32, with one reduction for each sharding."""
    by_sharding: dict[Any, list[torch.Tensor]] = defaultdict(list)
    for gradient in gradients:
        key = (gradient.device_mesh, gradient.placements) if isinstance(gradient, DTensor) else None
        by_sharding[key].append(gradient.detach().float())
    total = torch.zeros(())
    for some in by_sharding.values():
        norm = nn.utils.get_total_norm(some)
        whole = norm.full_tensor() if isinstance(norm, DTensor) else norm
        total = total.to(whole.device) + whole.square()
    return total
