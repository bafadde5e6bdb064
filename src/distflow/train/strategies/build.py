"""``parallelize``: a model made ready for a strategy, so that the training loop stays the same."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.nn  # before there is a process group, which it would keep: see `distflow.train.world._leave`
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from distflow.train.strategies.description import Strategy, choose, make_strategy, said_strategy
from distflow.train.strategies.initial import allocate, check_empty, fill
from distflow.train.strategies.layers import checkpoint_activations
from distflow.train.strategies.replicas import replicate
from distflow.train.strategies.stages import Loss, make_pipeline

__all__ = ["make_mesh", "parallelize"]


def parallelize(
    model: nn.Module,
    strategy: Strategy | str | None = None,
    *,
    loss: Loss | None = None,
    example: tuple[torch.Tensor, ...] | None = None,
    **options: Any,
) -> nn.Module:
    """Return the model, trained by all ranks together as the strategy says.

    ``strategy`` is a kind (``"fsdp"``), a ``Strategy``, or by default what ``DISTFLOW_STRATEGY`` says; ``options`` come on top
    of its own. The last call decides what ``current_strategy``, ``data_shard`` and a new ``Loader`` answer, until ``finish``.

    Every rank then starts from rank 0's parameters. Create the optimizer afterwards, from the parameters of what is
    returned. A pipeline needs ``loss`` and is stepped (``model.step(inputs, targets)``); all others are called as before.

    A model that was made under ``torch.device("meta")`` is cut first, and then each rank is given its part of the values that
    rank 0's random numbers give: no rank ever holds the whole, but under ``ddp`` and ``none``.

    Raises ``ValueError`` when the model does not fit the strategy, the strategy the number of ranks, or the options each other:
    what a spec may not say is refused here too.
    """
    chosen = _strategy(strategy, options)
    ready = _ready(model, chosen, loss, example)
    choose(chosen, dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", "0")))
    return ready


def make_mesh(strategy: Strategy) -> DeviceMesh:
    """Return torch's mesh over all ranks for a strategy. Raises ``ValueError`` when there is another number of ranks."""
    if not dist.is_initialized():
        raise ValueError("the ranks are not connected yet: call torch.distributed.init_process_group() before parallelize()")
    if strategy.world_size != dist.get_world_size():
        shape = " × ".join(map(str, strategy.shape))
        raise ValueError(f"the strategy is for {shape} = {strategy.world_size} ranks, but there are {dist.get_world_size()}")
    return init_device_mesh(_device().type, strategy.shape, mesh_dim_names=strategy.names)


def _ready(model: nn.Module, chosen: Strategy, loss: Loss | None, example: tuple[torch.Tensor, ...] | None) -> nn.Module:
    """Return the model on this rank's device, wrapped or cut as the strategy says."""
    if isinstance(model, nn.DataParallel) and chosen.world_size > 1:
        raise ValueError(
            "DataParallel is for one process alone, and each rank would copy to all GPUs: pass the module inside it"
        )
    device = _device()
    if not (empty := check_empty(model)):
        model = model.to(device)
    if chosen.options.get("activation_checkpointing"):
        checkpoint_activations(model, chosen.options)
    if chosen.kind == "none" or (chosen.world_size == 1 and chosen.kind != "pipeline"):
        return fill(allocate(model, device), device) if empty else model
    mesh = make_mesh(chosen)
    if chosen.kind == "ddp" or chosen.options.get("sharding_strategy") == "NO_SHARD":
        return replicate(fill(allocate(model, device), device) if empty else model, device, chosen.options)
    if not empty:
        _start_alike(model)
    ready = _cut(model, mesh, device, chosen, loss, example)
    if empty:
        fill(model, device)
    return ready


def _cut(
    model: nn.Module,
    mesh: DeviceMesh,
    device: torch.device,
    strategy: Strategy,
    loss: Loss | None,
    example: tuple[torch.Tensor, ...] | None,
) -> nn.Module:
    """Return what this rank holds of a model: a stage, or the model with parts of its tensors."""
    if strategy.kind == "pipeline":
        if loss is None:
            raise ValueError("a pipeline computes the loss in its last stage: parallelize(model, loss=…)")
        return make_pipeline(model, mesh, device, strategy.options, loss=loss, example=example)
    # Each kind imports what it needs of torch, which is a second or two: replicas need nothing.
    if strategy.size("tp") > 1:
        from distflow.train.strategies.tensors import split_tensors  # noqa: PLC0415

        split_tensors(model, mesh["tp"], strategy.options.get("plan"))
    if strategy.kind == "fsdp" or (strategy.kind == "hybrid" and strategy.size("fsdp") > 1):
        from distflow.train.strategies.shards import shard  # noqa: PLC0415

        shard(model, mesh if strategy.kind == "fsdp" else mesh["fsdp"], strategy.options)
    return allocate(model, device, offload=bool(strategy.options.get("cpu_offload")))


def _strategy(given: Strategy | str | None, options: Mapping[str, Any]) -> Strategy:
    if given is None and (given := said_strategy()) is None:
        # One rank too, so that it takes the options that more ranks will take.
        given = "ddp"
    if isinstance(given, str):
        world = dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))
        return make_strategy(given, world, options)
    return given.having(options)


def _device() -> torch.device:
    """Return where this rank computes: its GPU when the ranks talk by NCCL, else the CPU."""
    connected = dist.is_initialized()
    if torch.cuda.is_available() and (not connected or "nccl" in str(dist.get_backend_config())):
        local = int(os.environ.get("LOCAL_RANK", "0"))
        # A launcher may show each process its own GPU only; then it is the current one.
        return torch.device("cuda", local if local < torch.cuda.device_count() else torch.cuda.current_device())
    return torch.device("cpu")


def _start_alike(model: nn.Module) -> None:
    """Give every rank the parameters and buffers of rank 0, as DDP does by itself."""
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            dist.broadcast(tensor.detach(), 0)
