"""Evaluation in the worlds of ``test_strategies``: between steps of training, on batches of several sizes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from distflow.samples.gpt import loss_of
from distflow.train.parallel import ParallelPlan, parallelize
from distflow.train.strategies.description import Strategy, make_strategy
from distflow.train.strategies.stages import Loss
from train.ranks import Found, batch, new_model, optimizer_of, whole

__all__ = ["EVALUATED", "evaluations"]


def accuracy(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """A mean other than the training loss."""
    return (logits.argmax(-1) == targets).float().mean()


TRAINED = (8, 4, 8)
"""The batch sizes of the training steps."""
EVALUATIONS: tuple[tuple[int, Loss], ...] = ((8, loss_of), (7, loss_of), (7, accuracy))
"""The batch sizes and means after each step. Seven cannot be divided into equal shares or several micro-batches."""
EVALUATED: dict[int, dict[str, dict[str, Any]]] = {
    2: {
        "ddp": {},
        "fsdp": {},
        "fsdp SHARD_GRAD_OP": {"sharding_strategy": "SHARD_GRAD_OP"},
        "tp": {},
        "pipeline": {"micro_batches": 4},
        "pipeline interleaved": {"schedule": "interleaved_1f1b", "micro_batches": 4},
        "pipeline gpipe": {"schedule": "gpipe", "micro_batches": 4},
    },
    4: {"hybrid": {"tp_size": 2}, "pipeline": {}, "pipeline of replicas": {"stages": 2}},
    8: {"pipeline of shards and tensors": {"stages": 2, "shard_size": 2, "tp_size": 2}},
}
"""Ranks → name of a check, which begins with the kind → options."""


def evaluations(world: int) -> dict[str, Callable[[], Found]]:
    """Return the checks for this number of ranks."""
    found: dict[str, Callable[[], Found]] = {
        f"{name}, evaluated": partial(_between_steps, make_strategy(name.split()[0], world, options))
        for name, options in EVALUATED[world].items()
    }
    return found | ({"evaluation mode": _mode, "no samples": _none} if world == 2 else {})


def _between_steps(strategy: Strategy) -> Found:
    """Return the maximum differences of evaluations and of final parameters from those of one process."""
    plan, alone = parallelize(new_model(), strategy, loss=loss_of), new_model()
    model = plan.model
    optimizers = optimizer_of(model), optimizer_of(alone)
    index, count = strategy.data_shard(dist.get_rank())

    def cut(tensors: tuple[torch.Tensor, ...], size: int) -> list[torch.Tensor]:
        return [one[:size] for one in tensors]

    def mine(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        return [one.tensor_split(count)[index] for one in tensors]

    worst = 0.0
    for step, size in enumerate(TRAINED):
        whole_batch = cut(batch(step), size)
        inputs, targets = mine(whole_batch)
        plan.forward_backward(inputs, targets, loss_of)
        loss_of(alone(whole_batch[0]), whole_batch[1]).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for samples, mean in EVALUATIONS:
            whole_batch = cut(batch(100), samples)
            inputs, targets = mine(whole_batch)
            found = plan.evaluate(inputs, targets, mean)
            assert not found.requires_grad
            wanted = mean(alone(whole_batch[0]), whole_batch[1]).item()
            worst = max(worst, abs(found.item() - wanted) / max(1.0, wanted))
    target, got = dict(alone.named_parameters()), whole(model)
    farthest = torch.tensor([worst, max((got[name] - target[name]).abs().max().item() for name in got)])
    dist.all_reduce(farthest, dist.ReduceOp.MAX)
    return {"evaluations": farthest[0].item(), "parameters": farthest[1].item()}


def _mode() -> Found:
    """Check that evaluation turns dropout off, and restores the mode of each module and the shards."""
    inputs, targets = batch(0)
    found: Found = {}
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


def _none() -> Found:
    inputs, targets = batch(0)
    try:
        ParallelPlan(new_model(), make_strategy("none", 1)).evaluate(inputs[:0], targets[:0], loss_of)
    except ValueError as error:
        return {"error": str(error)}
    return {"error": "nothing"}
