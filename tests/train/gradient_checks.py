"""What a rank does in the world of ``test_gradients``: gradients after several passes, and what one process makes of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from distflow.train.strategies.stages import Pipeline
from train.ranks import Found, answer, prepared


def small() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 8))


def samples(size: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(size, 8, generator=torch.Generator().manual_seed(size)), torch.zeros(size, 8)


def piped(sizes: Sequence[int], schedule: str = "1f1b", micro_batches: int = 4) -> float:
    """How far the gradients of a pipeline are from one process's after batches of these sizes."""
    options = {"schedule": schedule, "micro_batches": micro_batches}
    plan, alone = prepared(small(), "pipeline", loss=nn.functional.mse_loss, **options), small()
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


def last_batches() -> Found:
    """Of 5 samples and of one, which cannot be cut into as many micro-batches as there are stages."""
    found = {str(size): piped([size]) for size in (8, 5, 1)}
    return found | {f"{size}, interleaved": piped([size], "interleaved_1f1b", 5) for size in (8, 5, 1)}


def batches_together() -> Found:
    """Before the optimizer steps, and the gradients are set to zero."""
    return {schedule: piped([8, 6, 5], schedule) for schedule in ("1f1b", "interleaved_1f1b")}


def trained(fails_at: int = 0, **options: Any) -> float:
    """How far the parameters are from one process's after steps of two passes each, of which one may fail on all ranks."""
    plan, alone = prepared(small(), "ddp", gradient_accumulation_steps=2, **options), small()
    model = plan.model
    passes = 0

    def loss_of(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        nonlocal passes
        passes += 1
        if passes == fails_at:
            raise ValueError("a sample that is none")
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


def static_graph() -> Found:
    return {"difference": trained(static_graph=True)}


def failed_pass() -> Found:
    """All ranks pass over the second batch, whose first pass is done when the second one fails."""
    return {"difference": trained(fails_at=4)}


CHECKS = {
    2: {
        "last batches": last_batches,
        "batches together": batches_together,
        "static graph": static_graph,
        "failed pass": failed_pass,
    },
}


if __name__ == "__main__":
    answer(CHECKS)
