"""Deprecated names of distflow 0.2, which warn when they are used.

Functions that are now methods of a plan use the strategy of the last plan, else the one that the spec sets, else ``ddp`` (or
``none`` for one rank).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from distflow.train import parallel
from distflow.train.communication import gradients
from distflow.train.strategies import description
from distflow.train.strategies.description import make_strategy, resolve_strategy
from distflow.train.strategies.stages import Pipeline

__all__ = ["Worker"]


def _parallelize(model: nn.Module, strategy: Any = None, *, loss: Any = None, example: Any = None, **options: Any) -> nn.Module:
    """Return ``world.parallelize(…).model``; ``options`` are those of the strategy in a spec."""
    if options:
        chosen = strategy if strategy is not None else description.current_strategy_or_none() or "ddp"
        world = parallel.world_size()
        if isinstance(chosen, str):
            strategy = make_strategy(chosen, world, options)
        else:
            strategy = resolve_strategy(chosen, world).having(options)
    return parallel.parallelize(model, strategy, loss=loss, example=example).model


def _deprecated(name: str, replacement: str, function: Callable[..., Any] | None = None) -> Callable[..., Any]:
    """Return a function that warns, and calls ``function`` or the plan's method that the replacement names."""
    method = replacement.removeprefix("plan.").partition("(")[0]

    def warn_and_call(*args: Any, **kwargs: Any) -> Any:
        warnings.warn(f"distflow.train.{name}() is deprecated: use {replacement}", DeprecationWarning, stacklevel=2)
        if function is not None:
            return function(*args, **kwargs)
        return getattr(parallel.ParallelPlan(args[0], description.current_strategy()), method)(*args[1:], **kwargs)

    return warn_and_call


class Worker:
    """A model with its optimizer. For a pipeline, a batch is a pair of inputs and targets."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, loss_of: Callable[[nn.Module, Any], Any]) -> None:
        advice = "distflow.train.Worker is deprecated: use plan.forward_backward, model_state and load_model_state"
        warnings.warn(advice, DeprecationWarning, stacklevel=2)
        plan = parallel.ParallelPlan(model, description.current_strategy())
        self.model, self.optimizer, self._loss_of = model, optimizer, loss_of
        self.get_model_state, self.set_model_state = plan.model_state, plan.load_model_state

    def train_step(self, batch: Any) -> float:
        """Take one step on this rank's batch, and return this rank's loss before the step."""
        self.model.train()
        self.optimizer.zero_grad()
        if isinstance(self.model, Pipeline):
            loss = self.model.step(*batch)
        else:
            loss = self._loss_of(self.model, batch)
            loss.backward()
        self.optimizer.step()
        return float(loss)


_PLAN = {
    "accumulate": "plan.accumulate()",
    "backward": "plan.forward_backward(inputs, targets, loss)",
    "clip_gradients": "plan.clip_gradients(max_norm)",
    "evaluate": "plan.evaluate(inputs, targets, loss)",
    "full_state_dict": "plan.full_state_dict()",
    "local_sgd": "plan.local_sgd(optimizer)",
}
_FUNCTIONS: dict[str, tuple[str, Callable[..., Any]]] = {
    "compress_gradients": ("world.parallelize(model, DDP(compression=…))", gradients.compress_gradients),
    "current_strategy": ("plan.strategy", description.current_strategy),
    "data_shard": ("plan.data_shard", description.data_shard),
    "parallelize": ("plan = world.parallelize(model, strategy)", _parallelize),
}
globals().update({name: _deprecated(name, replacement) for name, replacement in _PLAN.items()})
globals().update({name: _deprecated(name, *replacement) for name, replacement in _FUNCTIONS.items()})
