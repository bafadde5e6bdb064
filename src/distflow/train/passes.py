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
from distflow.train.strategies.description import current_strategy
from distflow.train.strategies.stages import Loss, Pipeline

__all__ = ["backward", "evaluate"]


def backward(model: nn.Module, inputs: Batch, targets: Batch, loss: Loss, *, micro_batches: int | None = None) -> torch.Tensor:
    """Run the forward and backward passes of this rank's batch; return its mean loss, a scalar without gradient.

    ``inputs`` are a tensor, a mapping (the model is called with its keys as names, as Hugging Face's models are) or a tuple
    (one argument each); ``targets`` may be of the same kinds, or ``None``. The batch is cut along the first dimension of its
    tensors into ``micro_batches`` (by default the strategy's ``gradient_accumulation_steps``), whose gradients are reduced over
    the ranks once, after the last. A pipeline takes its own number of them, and the ``loss`` that it was made with. Then step
    the optimizer. Raises ``ValueError`` for fewer samples than micro-batches.
    """
    if isinstance(model, Pipeline):
        return model.step(inputs, targets)
    count = current_strategy().passes if micro_batches is None else micro_batches
    samples = sample_count(inputs)
    if not 1 <= count <= samples:
        raise ValueError(f"a batch of {samples} samples cannot be cut into {count} micro-batches")
    begin_step(model)
    losses = []
    for some, wanted in zip(cut(inputs, count, samples), cut(targets, count, samples), strict=True):
        with accumulate(model, every=count):
            share = loss(_called(model, some), wanted) * (sample_count(some) / samples)
            share.backward()
        losses.append(share.detach())
    return torch.stack(losses).sum()


def evaluate(model: nn.Module, inputs: Batch, targets: Batch, loss: Loss) -> torch.Tensor:
    """Return the mean loss of a batch over all ranks' shares, a scalar without gradient that is equal on every rank.

    All ranks must call it, each with its own share (``data_shard``) of at least one sample; shares may differ in size. The
    inputs and targets are those of ``backward``. The model is in evaluation mode meanwhile. ``loss`` is any mean over samples:
    accuracy, too. Of a pipeline it is computed in the last stage, from the whole share, and need not be the one of training.
    Raises ``ValueError`` for no samples.
    """
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
