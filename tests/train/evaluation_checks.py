"""Checks of evaluation for ``test_strategies``: between training steps, and on batches of several sizes."""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from distflow.samples.gpt import loss_of
from distflow.train.parallel import ParallelPlan, parallelize
from distflow.train.strategies.description import make_strategy
from distflow.train.strategies.stages import Loss
from train.ranks import Results, batch, new_model

__all__ = ["empty_evaluation", "evaluation_difference", "evaluation_mode"]


def accuracy(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """A metric other than the training loss."""
    return (logits.argmax(-1) == targets).to(logits.dtype).mean()


EVALUATIONS: tuple[tuple[int, Loss], ...] = ((8, loss_of), (7, loss_of), (7, accuracy))
"""The batch sizes and metrics. Seven cannot be divided into equal shares or several micro-batches."""


def evaluation_difference(plan: ParallelPlan, alone: nn.Module) -> float:
    """Return the maximum difference between evaluations of a plan and of one process."""
    index, count = plan.data_shard
    worst = 0.0
    for samples, metric in EVALUATIONS:
        inputs, targets = (one[:samples] for one in batch(100))
        found = plan.evaluate(inputs.tensor_split(count)[index], targets.tensor_split(count)[index], metric)
        assert not found.requires_grad
        with torch.no_grad():
            wanted = metric(alone(inputs), targets).item()
        worst = max(worst, abs(found.item() - wanted) / max(1.0, wanted))
    return worst


def evaluation_mode() -> Results:
    """Check that evaluation turns dropout off, and restores the mode of each module and the shards."""
    inputs, targets = batch(0)
    found: Results = {}
    for kind in ("ddp", "fsdp", "pipeline"):
        alone, model = (nn.Sequential(OrderedDict([*new_model().named_children(), ("off", nn.Dropout(0.9))])) for _ in range(2))
        wanted = loss_of(alone.eval()(inputs), targets).item()
        model.get_submodule("block0").eval()
        plan = parallelize(model, kind, loss=loss_of)
        ready = plan.model
        before = [module.training for module in ready.modules()]
        difference = abs(plan.evaluate(inputs, targets, loss_of).item() - wanted)
        sharded = all(isinstance(one, DTensor) for one in ready.parameters())
        after = [module.training for module in ready.modules()]
        found[kind] = {"difference": difference, "modes": [set(map(str, before)) == {"True", "False"}, before == after]}
        assert sharded == (kind == "fsdp")
    return found


def empty_evaluation() -> Results:
    inputs, targets = batch(0)
    try:
        ParallelPlan(new_model(), make_strategy("none", 1)).evaluate(inputs[:0], targets[:0], loss_of)
    except ValueError as error:
        return {"error": str(error)}
    return {"error": ""}
