"""The functions of distflow 0.2 for the model that was prepared last. Each warns, and calls its method of ``ParallelPlan``."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch
from torch import nn

from distflow.train import parallel
from distflow.train.communication.gradients import compress_gradients as _compress
from distflow.train.loading.batching import Batch
from distflow.train.strategies import description
from distflow.train.strategies.description import Strategy, make_strategy, place
from distflow.train.strategies.stages import Loss

__all__ = [
    "accumulate",
    "backward",
    "clip_gradients",
    "compress_gradients",
    "current_strategy",
    "data_shard",
    "evaluate",
    "full_state_dict",
    "local_sgd",
    "parallelize",
]

_Function = TypeVar("_Function", bound=Callable[..., Any])


def _instead(replacement: str) -> Callable[[_Function], _Function]:
    """Let a function warn that the next release has only its replacement."""

    def wrap(function: _Function) -> _Function:
        @functools.wraps(function)
        def warn_and_call(*args: Any, **kwargs: Any) -> Any:
            name = function.__name__
            warnings.warn(f"distflow.train.{name}() is deprecated: use {replacement}", DeprecationWarning, stacklevel=2)
            return function(*args, **kwargs)

        return warn_and_call  # type: ignore[return-value]

    return wrap


def _plan(model: nn.Module) -> parallel.ParallelPlan:
    return parallel.ParallelPlan(model, description.current_strategy())


@_instead("plan = world.parallelize(model, strategy)")
def parallelize(
    model: nn.Module,
    strategy: Strategy | str | None = None,
    *,
    loss: Loss | None = None,
    example: tuple[torch.Tensor, ...] | None = None,
    **options: object,
) -> nn.Module:
    """Return ``world.parallelize(…).model``; ``options`` are those of the strategy, as a spec has them."""
    if options:
        given = strategy if strategy is not None else description.said_strategy() or "ddp"
        world = parallel.world_size()
        strategy = make_strategy(given, world, options) if isinstance(given, str) else place(given, world).having(options)
    return parallel.parallelize(model, strategy, loss=loss, example=example).model


@_instead("plan.forward_backward(inputs, targets, loss)")
def backward(model: nn.Module, inputs: Batch, targets: Batch, loss: Loss, *, micro_batches: int | None = None) -> torch.Tensor:
    """Call ``ParallelPlan.forward_backward``."""
    return _plan(model).forward_backward(inputs, targets, loss, micro_batches=micro_batches)


@_instead("plan.evaluate(inputs, targets, loss)")
def evaluate(model: nn.Module, inputs: Batch, targets: Batch, loss: Loss) -> torch.Tensor:
    """Call ``ParallelPlan.evaluate``."""
    return _plan(model).evaluate(inputs, targets, loss)


@_instead("plan.accumulate()")
def accumulate(model: nn.Module, every: int | None = None) -> AbstractContextManager[bool]:
    """Call ``ParallelPlan.accumulate``."""
    return _plan(model).accumulate(every)


@_instead("plan.clip_gradients(max_norm)")
def clip_gradients(model: nn.Module, max_norm: float) -> torch.Tensor:
    """Call ``ParallelPlan.clip_gradients``."""
    return _plan(model).clip_gradients(max_norm)


@_instead("plan.local_sgd(optimizer)")
def local_sgd(
    model: nn.Module, optimizer: torch.optim.Optimizer, *, every: int | None = None, warmup_steps: int = 0
) -> torch.optim.Optimizer:
    """Call ``ParallelPlan.local_sgd``."""
    return _plan(model).local_sgd(optimizer, every=every, warmup_steps=warmup_steps)


@_instead("plan.full_state_dict()")
def full_state_dict(model: nn.Module) -> dict[str, Any]:
    """Call ``ParallelPlan.full_state_dict``."""
    return _plan(model).full_state_dict()


@_instead("world.parallelize(model, DDP(compression=…))")
def compress_gradients(
    model: nn.parallel.DistributedDataParallel, how: str, *, rank: int = 1, start_iteration: int = 10
) -> None:
    """Let DDP send its gradients as ``fp16``, ``bf16`` or with ``powersgd``."""
    _compress(model, how, rank=rank, start_iteration=start_iteration)


@_instead("plan.data_shard")
def data_shard(environ: Mapping[str, str] | None = None) -> tuple[int, int]:
    """Return ``data_shard`` of the last plan, or of ``DISTFLOW_STRATEGY``."""
    return description.data_shard(environ)


@_instead("plan.strategy")
def current_strategy(environ: Mapping[str, str] | None = None) -> Strategy:
    """Return ``strategy`` of the last plan, or of ``DISTFLOW_STRATEGY``."""
    return description.current_strategy(environ)
