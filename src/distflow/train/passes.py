"""One call for the passes of a step, and one for an evaluation, so that one training loop serves every strategy."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from distflow.train.communication.gradients import accumulate, begin_step
from distflow.train.loading.batching import Batch, as_arguments, cut, sample_count
from distflow.train.strategies.stages import Loss, Pipeline

__all__ = ["evaluate", "forward_backward"]


def forward_backward(
    model: nn.Module, inputs: Batch, targets: Batch, loss: Loss, *, micro_batches: int = 1, apart: int = 1
) -> torch.Tensor:
    """Do what ``ParallelPlan.forward_backward`` does. ``apart`` is the strategy's ``sync_gradients_every``."""
    if isinstance(model, Pipeline):
        return model.step(inputs, targets)
    count, samples = micro_batches, sample_count(inputs)
    if not 1 <= count <= samples:
        raise ValueError(f"a batch of {samples} samples cannot be cut into {count} micro-batches")
    begin_step(model)
    losses = []
    for some, wanted in zip(cut(inputs, count, samples), cut(targets, count, samples), strict=True):
        with accumulate(model, count, apart=apart):
            share = loss(_called(model, some), wanted) * (sample_count(some) / samples)
            share.backward()
        losses.append(share.detach())
    return torch.stack(losses).sum()


def evaluate(model: nn.Module, inputs: Batch, targets: Batch, loss: Loss) -> torch.Tensor:
    """Do what ``ParallelPlan.evaluate`` does."""
    samples = sample_count(inputs)
    if not samples:
        raise ValueError("evaluate() was given no samples; every rank needs at least one")
    with torch.no_grad(), _evaluating(model):
        mean = model.evaluate(inputs, targets, loss) if isinstance(model, Pipeline) else loss(_called(model, inputs), targets)
        if not dist.is_initialized():
            return mean
        # Each share is held by equally many ranks, so that those who share a tensor or a pipeline change nothing.
        total = torch.stack([mean.double() * samples, mean.new_tensor(samples, dtype=torch.float64)])
        dist.all_reduce(total)
        return (total[0] / total[1]).to(mean.dtype)


def _called(model: nn.Module, inputs: Batch) -> Any:
    arguments, named = as_arguments(inputs)
    return model(*arguments, **named)


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Put a model into evaluation mode, and each module back into its own; let shards that were gathered go."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True
        for module in model.modules():
            # FSDP2's keep what the backward pass would need; the parameters would not be shards until then.
            if (reshard := getattr(module, "reshard", None)) is not None:
                reshard()
