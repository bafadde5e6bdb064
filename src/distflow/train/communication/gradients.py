"""Reduce gradients over the ranks: compressed, accumulated, or in buckets.

Every reduction computes the mean, not the sum, and gives all ranks exactly equal values.

This module does not import ``annotations`` from ``__future__``: DDP requires that a hook's annotations are types.
"""

import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.nn.parallel import DistributedDataParallel

__all__ = [
    "accumulate",
    "all_reduce_mean",
    "begin_step",
    "compress_gradients",
    "local_gradients",
    "local_sgd",
    "means_of",
    "uses_local_sgd",
]

_MIB = 2**20
_passes: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()
"""Number of backward passes of each model in the current step."""
_warned_or_averaged: WeakSet[nn.Module] = WeakSet()
"""Models that were given to ``local_sgd``, or about which ``accumulate`` has warned."""
_averagers: WeakKeyDictionary[nn.Module, PeriodicModelAverager] = WeakKeyDictionary()
"""The averager of each model under ``local_sgd``. The key is the module that DDP wraps."""


# -- compression ------------------------------------------------------------------------------------------------------


def compress_gradients(model: DistributedDataParallel, how: str, *, rank: int = 1, start_iteration: int = 10) -> None:
    """Let DDP compress gradients: ``fp16`` and ``bf16`` send 16-bit numbers, ``powersgd`` sends a low-rank approximation.

    ``rank`` is that of the approximation. PowerSGD sends the first ``start_iteration`` steps (at least 2) uncompressed.
    """
    group = model.process_group
    if how == "fp16":
        model.register_comm_hook(group, default_hooks.fp16_compress_hook)
    elif how == "bf16":
        # DDP accepts torch's hook only in builds with NCCL or XCCL. `_in_bfloat16` works in every build.
        needs_substitute = dist.get_backend(group) not in ("nccl", "xccl")
        model.register_comm_hook(group, _in_bfloat16 if needs_substitute else default_hooks.bf16_compress_hook)
    elif how == "powersgd":
        state = powerSGD_hook.PowerSGDState(group, matrix_approximation_rank=rank, start_powerSGD_iter=max(start_iteration, 2))
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    else:
        raise ValueError(f"compression {how!r} does not exist: give fp16, bf16 or powersgd")


def _in_bfloat16(state: dist.ProcessGroup, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket of gradients over the ranks, sent as bfloat16, also if torch has neither NCCL nor XCCL."""
    gradients = bucket.buffer()
    work = dist.all_reduce(gradients.to(torch.bfloat16).div_(state.size()), group=state, async_op=True)
    future: torch.futures.Future[torch.Tensor] = work.get_future().then(lambda done: gradients.copy_(done.value()[0]))
    return future


# -- accumulation -----------------------------------------------------------------------------------------------------


@contextmanager
def accumulate(model: nn.Module, steps: int, *, sync_every: int = 1) -> Iterator[bool]:
    """Implement ``ParallelPlan.accumulate``.

    ``sync_every`` is the strategy's ``sync_gradients_every``. If it is above 1, warns once for a model in DDP without
    ``local_sgd``.
    """
    if steps < 1:
        raise ValueError(f"every={steps}: give 1 or more")
    if sync_every > 1 and isinstance(model, DistributedDataParallel) and model not in _warned_or_averaged:
        _warned_or_averaged.add(model)
        warnings.warn(
            f"the strategy says sync_gradients_every: {sync_every}, but gradients are averaged in every step: write "
            "`optimizer = plan.local_sgd(optimizer)` before the first step",
            stacklevel=4,
        )
    done = _passes.get(model, 0) + 1
    is_last = done >= steps
    # Models in FSDP2 have this method. isinstance would need the import of FSDP2.
    if (set_sync := getattr(model, "set_requires_gradient_sync", None)) is not None:
        set_sync(is_last)
    # torch records a static graph in the first pass, and only if that pass reduces gradients.
    records_graph = model not in _passes and getattr(model, "static_graph", False)
    with model.no_sync() if isinstance(model, DistributedDataParallel) and not is_last and not records_graph else nullcontext():
        yield is_last
    # After an error the count is unchanged, so that the pass can be repeated.
    _passes[model] = 0 if is_last else done


def begin_step(model: nn.Module) -> None:
    """Reset the count of passes, because passes before a failure do not belong to the next step."""
    if model in _passes:
        _passes[model] = 0


def local_sgd(
    model: nn.Module, optimizer: torch.optim.Optimizer, *, every: int, warmup_steps: int = 0
) -> torch.optim.Optimizer:
    """Implement ``ParallelPlan.local_sgd``, for a model in DDP without compression."""
    if every < 1:
        raise ValueError(f"every={every}: give 1 or more")
    _warned_or_averaged.add(model)
    if every == 1 or not dist.is_initialized() or dist.get_world_size() == 1:
        return optimizer
    # Importing this module makes torch compile scripts, which causes a warning.
    from torch.distributed.optim import PostLocalSGDOptimizer  # noqa: PLC0415

    if not isinstance(model, DistributedDataParallel):
        raise TypeError(f"local SGD needs replicas (kind: ddp); this model is a {type(model).__name__}")
    # The averager counts from 0 and averages in its first step after its warm-up: the ``every``-th step after ``warmup_steps``.
    averager = PeriodicModelAverager(period=every, warmup_steps=warmup_steps + every - 1, process_group=model.process_group)
    model.register_comm_hook((averager, warmup_steps), _average_in_warm_up)
    _averagers[model.module] = averager
    return PostLocalSGDOptimizer(optim=optimizer, averager=averager)


def _average_in_warm_up(state: tuple[PeriodicModelAverager, int], bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average gradients over the ranks in the warm-up steps only.

    Unlike torch's own hook, it reads the step from the averager, which a checkpoint restores.
    """
    averager, warmup_steps = state
    if averager.step < warmup_steps:
        return default_hooks.allreduce_hook(averager.process_group, bucket)
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def uses_local_sgd(model: object) -> bool:
    """Return whether ``local_sgd`` averages the model's parameters in the optimizer's step."""
    return isinstance(model, DistributedDataParallel) and model.module in _averagers


def means_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the mean parameters by name if ranks differ now under ``local_sgd``, else an empty dictionary. Collective."""
    inner: nn.Module = model.module if isinstance(model, DistributedDataParallel) else model
    if (averager := _averagers.get(inner)) is None or not _parameters_differ(averager):
        return {}
    # If a parameter has two names, a state dictionary contains both.
    means = {name: one.detach().clone() for name, one in inner.named_parameters(remove_duplicate=False)}
    all_reduce_mean(means.values(), group=averager.process_group)
    return means


def _parameters_differ(averager: PeriodicModelAverager) -> bool:
    """Return whether the ranks' parameters differ now: the last step was neither an average nor one of the warm-up."""
    last, period = int(averager.step) - 1, int(averager.period)
    return last > int(averager.warmup_steps) - period and (last - int(averager.warmup_steps)) % period != 0


# -- buckets ----------------------------------------------------------------------------------------------------------


def all_reduce_mean(tensors: Iterable[torch.Tensor], *, bucket_mb: float = 25.0, group: dist.ProcessGroup | None = None) -> int:
    """Replace tensors (such as gradients of a plain module) by their mean over the ranks, and return the number of reductions.

    Tensors of one dtype and device are sent in buckets of about ``bucket_mb`` MiB, all at the same time. Collective: all ranks
    must give tensors of the same shapes in the same order.
    """
    buckets = _buckets(tensors, int(bucket_mb * _MIB))
    world = dist.get_world_size(group)
    pending: list[tuple[list[torch.Tensor], torch.Tensor, Any]] = []
    for bucket in buckets:
        flat = torch.cat([tensor.detach().reshape(-1) for tensor in bucket])
        pending.append((bucket, flat, dist.all_reduce(flat, group=group, async_op=True)))
    for bucket, flat, work in pending:
        work.wait()
        flat.div_(world)
        for tensor, mean in zip(bucket, flat.split([tensor.numel() for tensor in bucket]), strict=True):
            tensor.detach().copy_(mean.view_as(tensor))
    return len(buckets)


def local_gradients(parameters: Iterable[nn.Parameter]) -> list[torch.Tensor]:
    """Return the gradients; of a ``DTensor``, only this rank's part."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    return [gradient.to_local() if hasattr(gradient, "to_local") else gradient for gradient in gradients]


def _buckets(tensors: Iterable[torch.Tensor], limit: int) -> list[list[torch.Tensor]]:
    """Return the tensors in buckets of one dtype and device, each closed once it has ``limit`` bytes."""
    closed: list[list[torch.Tensor]] = []
    open_ones: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for tensor in tensors:
        key = (tensor.dtype, tensor.device)
        bucket = open_ones.setdefault(key, [])
        bucket.append(tensor)
        if sum(one.nbytes for one in bucket) >= limit:
            closed.append(open_ones.pop(key))
    return [*closed, *open_ones.values()]
