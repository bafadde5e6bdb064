"""Checks of models on the meta device for ``test_strategies``: each rank gets its part of one process's initial values."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from distflow.samples.gpt import Gpt, loss_of
from distflow.train.parallel import ParallelPlan, parallelize
from distflow.train.strategies.description import Strategy
from train.ranks import TIME, Results, make_plan, whole_parameters

__all__ = ["initialization_errors", "initialized", "unusual_modules"]


def initialized(strategy: Strategy) -> tuple[ParallelPlan, nn.Module, Results]:
    """Initialize a model on the meta device, under a strategy and in one process. Return both models.

    The results are the maximum difference of their initial values, and the maximum share of the model in a rank's memory.
    """
    alone, model = _on_meta(), _on_meta()
    torch.manual_seed(0)
    parallelize(alone, "none")
    torch.manual_seed(dist.get_rank())  # rank 0's random numbers count
    with _recorded_sizes(model) as held:
        plan = parallelize(model, strategy, loss=loss_of)
    first = _difference(whole_parameters(plan.model), dict(alone.named_parameters()))
    return plan, alone, {"first": first, "held": max(held) / sum(one.numel() for one in alone.parameters())}


def _on_meta() -> Gpt:
    with torch.device("meta"):
        return Gpt(layers=4, hidden=32, heads=4, context=TIME)


def _difference(got: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> float:
    worst = torch.tensor(max((got[name].detach() - wanted[name].detach()).abs().max().item() for name in got))
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    return worst.item()


@contextmanager
def _recorded_sizes(model: nn.Module) -> Iterator[list[int]]:
    """Yield a list with the number of values in memory at each initialization of a matrix."""
    held: list[int] = [0]
    plain = nn.Linear.reset_parameters

    def recording(self: nn.Linear) -> None:
        plain(self)
        parts = [one.to_local() if isinstance(one, DTensor) else one for one in model.parameters()]
        held.append(self.weight.numel() + sum(one.numel() for one in parts if not one.is_meta))

    nn.Linear.reset_parameters = recording  # type: ignore[method-assign]
    try:
        yield held
    finally:
        nn.Linear.reset_parameters = plain  # type: ignore[method-assign]


class _Scale(nn.Module):
    """A module with a parameter, a non-persistent buffer and a child; ``sets`` names the tensors that it initializes."""

    table: torch.Tensor

    def __init__(self, *sets: str) -> None:
        super().__init__()
        self.sets = sets
        self.inner = nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.ones(4))
        self.register_buffer("table", torch.arange(4.0), persistent=False)

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.inner.bias)
        if "scale" in self.sets:
            nn.init.normal_(self.scale)
        if "table" in self.sets:
            self.table.copy_(torch.arange(4.0))


def unusual_modules() -> Results:
    """Check that modules with buffers and children are initialized equally on all ranks, and completely."""
    torch.manual_seed(dist.get_rank())
    with torch.device("meta"):
        model = nn.Sequential(_Scale("scale", "table"), nn.BatchNorm1d(4), nn.MultiheadAttention(4, 2))
    ready = parallelize(model, "fsdp").model
    values = torch.cat([one.flatten().float() for one in (*whole_parameters(ready).values(), *ready.buffers())])
    others = [torch.empty_like(values) for _ in range(dist.get_world_size())]
    dist.all_gather(others, values)
    table = ready.get_buffer("0.table").tolist()
    return {
        "alike": all(bool((one == values).all()) for one in others),
        "finite": bool(values.isfinite().all()),
        "table": table,
    }


def initialization_errors() -> Results:
    """Return the errors of models that cannot be initialized."""

    def on_meta(make: Callable[[], nn.Module]) -> nn.Module:
        with torch.device("meta"):
            return make()

    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))

    class Forgetful(nn.Module):
        """A model that initializes its modules as models of Hugging Face do, but forgets the weight of a linear layer."""

        base_model_prefix = "model"

        def __init__(self) -> None:
            super().__init__()
            self.part = nn.Linear(4, 4)

        def _init_weights(self, module: nn.Module) -> None:
            if isinstance(module, nn.Linear):
                nn.init.zeros_(module.bias)

    def tied() -> nn.Module:
        model = nn.Sequential(nn.Embedding(4, 4), nn.Linear(4, 4, bias=False))
        model[1].weight = model[0].weight
        return model

    def partly() -> nn.Module:
        return nn.Sequential(on_meta(lambda: nn.Linear(4, 4)), nn.Linear(4, 4))

    wrong: dict[str, Callable[[], object]] = {
        "bare": lambda: parallelize(on_meta(lambda: nn.Sequential(nn.Linear(4, 4), Bare())), "fsdp"),
        "tied": lambda: parallelize(on_meta(tied), "pipeline", loss=loss_of),
        "partly": lambda: parallelize(partly(), "fsdp"),
        "forgotten": lambda: parallelize(on_meta(lambda: nn.Sequential(_Scale("scale"))), "fsdp"),
        "forgotten by the model": lambda: parallelize(on_meta(Forgetful), "fsdp"),
        "traced": lambda: make_plan(
            on_meta(lambda: _Scale("scale")), "pipeline", loss=loss_of, example=(torch.ones(2, 4),), split_points=["inner"]
        ),
    }
    found = {}
    for name, call in wrong.items():
        try:
            call()
            found[name] = ""
        except ValueError as error:
            found[name] = str(error)
    return found
