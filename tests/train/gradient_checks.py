"""The checks that the ranks of ``test_gradients`` run: they compare gradients of several passes with those of one process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from distflow.train.strategies.stages import Pipeline
from train.ranks import Results, make_plan, run_checks


def small_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 8))


def samples(size: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(size, 8, generator=torch.Generator().manual_seed(size)), torch.zeros(size, 8)


def pipeline_difference(sizes: Sequence[int], schedule: str = "1f1b", micro_batches: int = 4) -> float:
    """Return the maximum difference between a pipeline's and one process's gradients after batches of these sizes."""
    options = {"schedule": schedule, "micro_batches": micro_batches}
    plan, alone = make_plan(small_model(), "pipeline", loss=nn.functional.mse_loss, **options), small_model()
    model = plan.model
    assert isinstance(model, Pipeline)
    for size in sizes:
        inputs, targets = samples(size)
        loss = plan.forward_backward(inputs, targets, nn.functional.mse_loss)
        wanted = nn.functional.mse_loss(alone(inputs), targets)
        wanted.backward()
        assert abs(loss.item() - wanted.item()) < 1e-6
    others = dict(alone.named_parameters())
    pairs = [(torch.as_tensor(one.grad), torch.as_tensor(others[name].grad)) for name, one in model.part.named_parameters()]
    worst = torch.stack([(one - other).abs().max() for one, other in pairs]).max()
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    return worst.item()


def last_batches() -> Results:
    """Use batches of 8, 5 and 1 samples. Each schedule can divide only one of them into equal micro-batches."""
    found = {str(size): pipeline_difference([size]) for size in (8, 5, 1)}
    return found | {f"{size}, interleaved": pipeline_difference([size], "interleaved_1f1b", 5) for size in (8, 5, 1)}


def several_batches() -> Results:
    """Add up the gradients of three batches, without a step of the optimizer in between."""
    return {schedule: pipeline_difference([8, 6, 5], schedule) for schedule in ("1f1b", "interleaved_1f1b")}


def ddp_difference(fails_at: int = 0, **options: Any) -> float:
    """Return the maximum difference from one process's parameters after steps of two passes each.

    ``fails_at`` is the number of the pass that fails on all ranks.
    """
    plan, alone = make_plan(small_model(), "ddp", gradient_accumulation_steps=2, **options), small_model()
    model = plan.model
    passes = 0

    def loss_of(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        nonlocal passes
        passes += 1
        if passes == fails_at:
            raise ValueError("invalid sample")
        return nn.functional.mse_loss(outputs, targets)

    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (model, alone)]
    for size in (8, 16, 24, 32):
        inputs, targets = samples(size)
        mine = [one.tensor_split(2)[dist.get_rank()] for one in (inputs, targets)]
        try:
            plan.forward_backward(mine[0], mine[1], loss_of)
            nn.functional.mse_loss(alone(inputs), targets).backward()
        except ValueError:
            optimizers[0].zero_grad()
            continue
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    got, wanted = (nn.utils.parameters_to_vector(one.parameters()).detach() for one in (model, alone))
    worst = (got - wanted).abs().max()
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    return worst.item()


def static_graph() -> Results:
    return {"difference": ddp_difference(static_graph=True)}


def failed_pass() -> Results:
    """The second pass of the second batch fails, after its first pass has left gradients. All ranks skip this batch."""
    return {"difference": ddp_difference(fails_at=4)}


CHECKS = {
    2: {
        "last batches": last_batches,
        "several batches": several_batches,
        "static graph": static_graph,
        "failed pass": failed_pass,
    },
}


if __name__ == "__main__":
    run_checks(CHECKS)
