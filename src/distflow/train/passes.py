"""One call for the passes of a step, so that one training loop serves every strategy."""

from __future__ import annotations

import torch
from torch import nn

from distflow.train.communication import accumulate
from distflow.train.strategies.description import current_strategy
from distflow.train.strategies.stages import Loss, Pipeline

__all__ = ["backward"]


def backward(
    model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor, loss: Loss, *, micro_batches: int | None = None
) -> torch.Tensor:
    """Run the forward and backward passes of this rank's batch; return its mean loss, a scalar without gradient.

    The batch is cut along its first dimension into ``micro_batches`` (by default the strategy's
    ``gradient_accumulation_steps``), whose gradients are reduced over the ranks once, after the last. A pipeline takes its own
    number of them, and the ``loss`` that it was made with. Then step the optimiser. Raises ``ValueError`` for fewer samples
    than micro-batches.
    """
    if isinstance(model, Pipeline):
        return model.step(inputs, targets)
    count = current_strategy().passes if micro_batches is None else micro_batches
    if not 1 <= count <= len(inputs):
        raise ValueError(f"a batch of {len(inputs)} samples cannot be cut into {count} micro-batches")
    total = torch.zeros((), device=inputs.device)
    for some, wanted in zip(inputs.tensor_split(count), targets.tensor_split(count), strict=True):
        with accumulate(model, every=count):
            share = loss(model(some), wanted) * (len(some) / len(inputs))
            share.backward()
        total += share.detach()
    return total
