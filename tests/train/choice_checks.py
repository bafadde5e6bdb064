"""A check of strategies that the program chooses without a spec: functions without a plan use the last strategy."""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from distflow.samples.gpt import loss_of
from distflow.train import EpochSampler, Loader
from distflow.train.parallel import parallelize
from distflow.train.strategies.description import data_shard, reset_current_strategy
from train.ranks import BATCH, STEPS, Results, batch, make_plan, new_model, optimizer_of, reference, whole_parameters

__all__ = ["calls_without_plan"]


def calls_without_plan() -> Results:
    """Return the difference from single-process training, the data of each rank, errors and warnings."""
    reset_current_strategy()
    early_loader, explicit = Loader(range(BATCH), BATCH), EpochSampler(BATCH, rank=0, world_size=1)
    plan = make_plan(new_model(), "hybrid", tp_size=2, gradient_accumulation_steps=2)
    model = plan.model
    optimizer, (index, count), passes = optimizer_of(model), data_shard(), 0
    assert plan.data_shard == (index, count)

    def counting_loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        nonlocal passes
        passes += 1
        return loss_of(outputs, targets)

    for step in range(STEPS):
        inputs, targets = (one.tensor_split(count)[index] for one in batch(step))
        plan.forward_backward(inputs, targets, counting_loss)
        optimizer.step()
        optimizer.zero_grad()
    wanted, got = reference(), whole_parameters(model)
    worst = torch.tensor(max((got[name] - wanted[name]).abs().max().item() for name in got))
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    samples: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(samples, [sample for batch_of_two in Loader(range(BATCH), 2) for sample in batch_of_two.tolist()])
    found: Results = {
        "difference": worst.item(),
        "passes": passes,
        "samples": samples,
        "explicit": len(list(explicit)),
        "early": "",
    }
    try:
        list(early_loader)
    except ValueError as error:
        found["early"] = str(error)
    parallelize(nn.Linear(2, 2), "none")
    found["with a frozen model"] = data_shard()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        parallelize(nn.Linear(2, 2), "ddp")
        plan.loader(range(BATCH), 2)
        assert not [one for one in caught if "was prepared" in str(one.message)]
        found["of the last plan"] = data_shard()
    found["warnings"] = [str(one.message) for one in caught if "was prepared" in str(one.message)]
    reset_current_strategy()
    return found
