"""Prepare a model for a strategy, so that the training loop stays the same.

FSDP gathers the repeated layers of a model one at a time, and activation checkpointing computes them again. Replicas of a
model use torch's DistributedDataParallel.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Collection, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.nn  # before there is a process group, which it would keep: see `distflow.train.world._leave`
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from distflow.train.communication.gradients import compress_gradients
from distflow.train.strategies.description import Strategy
from distflow.train.strategies.initial import allocate, check_empty, fill
from distflow.train.strategies.stages import Loss, make_pipeline

__all__ = [
    "checkpoint_activations",
    "large_modules",
    "make_mesh",
    "make_sequence_mesh",
    "prepare",
    "repeated_layers",
    "replicate",
]


def make_mesh(strategy: Strategy) -> DeviceMesh:
    """Return torch's mesh over all ranks for a strategy. Raises ``ValueError`` when there is another number of ranks."""
    if not dist.is_initialized():
        raise ValueError("the ranks are not connected yet: call world = train.init(), and then world.parallelize(…)")
    if strategy.world_size != dist.get_world_size():
        shape = " × ".join(map(str, strategy.shape))
        raise ValueError(f"the strategy is for {shape} = {strategy.world_size} ranks, but there are {dist.get_world_size()}")
    # Ranks that share sequences share the model, too: FSDP shards it over both axes.
    sizes = strategy.mesh
    if (parts := sizes.pop("cp", 1)) > 1:
        sizes["fsdp"] *= parts
    return init_device_mesh(_device().type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))


def make_sequence_mesh(strategy: Strategy) -> DeviceMesh | None:
    """Return the mesh of the ranks that share this rank's sequences (``cp``). Collective."""
    if "cp" not in strategy.names:
        return None
    mesh = init_device_mesh(_device().type, strategy.shape, mesh_dim_names=strategy.names)
    return mesh["cp"]


def prepare(
    model: nn.Module,
    chosen: Strategy,
    loss: Loss | None = None,
    example: tuple[torch.Tensor, ...] | None = None,
    loaded: Collection[str] = (),
) -> nn.Module:
    """Return the model on this rank's device, wrapped or cut as the strategy says. Collective.

    ``loaded`` are the names of tensors that get their values from a file later.
    """
    if isinstance(model, nn.DataParallel) and chosen.world_size > 1:
        raise ValueError(
            "DataParallel is for one process alone, and each rank would copy to all GPUs: pass the module inside it"
        )
    device = _device()
    if not (empty := check_empty(model, loaded)):
        model = model.to(device)
    if chosen.options.get("activation_checkpointing"):
        checkpoint_activations(model, chosen.options)
    if chosen.kind == "none" or (chosen.world_size == 1 and chosen.kind != "pipeline"):
        return fill(allocate(model, device), device, loaded) if empty else model
    mesh = make_mesh(chosen)
    if chosen.kind == "ddp" or chosen.options.get("sharding_strategy") == "NO_SHARD":
        return replicate(fill(allocate(model, device), device, loaded) if empty else model, device, chosen.options)
    if not empty:
        _start_alike(model)
    ready = _divide(model, mesh, device, chosen, loss, example)
    if empty:
        fill(model, device, loaded)
    return ready


def _divide(
    model: nn.Module,
    mesh: DeviceMesh,
    device: torch.device,
    strategy: Strategy,
    loss: Loss | None,
    example: tuple[torch.Tensor, ...] | None,
) -> nn.Module:
    """Return this rank's part of a model: its stages, or the model with parts of its tensors."""
    options, sizes = strategy.options, strategy.mesh
    has_tensors, has_shards = sizes.get("tp", 1) > 1, "fsdp" in sizes
    if "cp" in sizes:
        from distflow.train.strategies.sequences import check_sequences  # noqa: PLC0415

        check_sequences(model, device.type)
    layers = repeated_layers(model, options.get("transformer_layer_cls", ())) if has_tensors or has_shards else []
    # Import only the parts of torch that the strategy needs, because each takes a second or two.
    if has_tensors:
        from distflow.train.strategies.tensors import split_tensors, tensor_styles  # noqa: PLC0415

        styles = tensor_styles(model, sizes["tp"], options.get("plan"))
        if options.get("sequence_parallel") and not layers:
            raise ValueError("sequence_parallel: no repeated layers found; name their class in transformer_layer_cls")
    if has_shards:
        from distflow.train.strategies.shards import shard  # noqa: PLC0415

    def divide(part: nn.Module) -> nn.Module:
        inside = set(part.modules())
        own_layers = [layer for layer in layers if layer in inside]
        if has_tensors:
            split_tensors(part, mesh["tp"], styles, own_layers if options.get("sequence_parallel") else None)
        if has_shards:
            shard(part, mesh["dp", "fsdp"] if "dp" in sizes else mesh["fsdp"], options, own_layers)
        return allocate(part, device, offload=bool(options.get("cpu_offload")))

    if strategy.kind != "pipeline":
        return divide(model)
    if loss is None:
        raise ValueError("a pipeline needs a loss function for its last stage: call parallelize(model, loss=…)")
    return make_pipeline(model, mesh, device, options, loss=loss, example=example, divide=divide)


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


_LARGE = 100_000_000
"""Parameters from which on a module is wrapped by size, as torch's size-based policy has it."""


def repeated_layers(model: nn.Module, class_names: Collection[str] = ()) -> list[nn.Module]:
    """Return the model's layers: modules of the named classes, or else siblings of one class that have parts of their own.

    Layers inside of layers are left out. Raises ``ValueError`` when a class name matches nothing.
    """
    if class_names:
        found = [module for module in model.modules() if type(module).__name__ in class_names]
        if missing := set(class_names) - {type(module).__name__ for module in found}:
            there = sorted({type(module).__name__ for module in model.modules()})
            raise ValueError(f"the model has no layer of class {', '.join(sorted(missing))}; it has {', '.join(there)}")
        return found
    layers: list[nn.Module] = []
    waiting = [model]
    while waiting:
        children = list(waiting.pop(0).children())
        classes = Counter(type(child) for child in children if _has_parts(child))
        for child in children:
            if classes[type(child)] > 1 and not isinstance(child, nn.ModuleList | nn.ModuleDict):
                layers.append(child)
            else:
                waiting.append(child)
    return layers


def large_modules(model: nn.Module, least: int = _LARGE) -> list[nn.Module]:
    """Return modules, inner before outer, with at least that many parameters that no returned one inside of them has."""
    found: list[nn.Module] = []

    def visit(module: nn.Module) -> int:
        own = sum(parameter.numel() for parameter in module.parameters(recurse=False))
        own += sum(visit(child) for child in module.children())
        if own < least or module is model or isinstance(module, nn.ModuleList | nn.ModuleDict):
            return own
        found.append(module)
        return 0

    visit(model)
    return found


def checkpoint_activations(model: nn.Module, options: Mapping[str, Any]) -> None:
    """Let each layer keep only its input, and compute the rest again in the backward pass.

    Raises ``ValueError`` when the model has no layers.
    """
    layers = repeated_layers(model, options.get("transformer_layer_cls", ()))
    if not layers:
        raise ValueError("activation_checkpointing: no repeated layers found; name their class in transformer_layer_cls")
    for layer in layers:
        # Not a wrapper module: the names of the parameters stay, and so do checkpoints.
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)


def _has_parts(module: nn.Module) -> bool:
    return any(True for _ in module.children()) and any(True for _ in module.parameters())


_TORCHS = ("bucket_cap_mb", "static_graph", "find_unused_parameters")


def replicate(model: nn.Module, device: torch.device, options: Mapping[str, Any]) -> nn.Module:
    """Return the model wrapped so that its gradients are averaged over all ranks during the backward pass."""
    if not any(parameter.requires_grad for parameter in model.parameters()):
        # Nothing to average, which torch refuses.
        return model
    settings = {name: options[name] for name in _TORCHS if name in options}
    settings["gradient_as_bucket_view"] = options.get("gradient_as_bucket_view", True)
    wrapped = DistributedDataParallel(model, device_ids=[device] if device.type == "cuda" else None, **settings)
    compression = options.get("compression", "none")
    if compression != "none":
        rank = {"rank": options["powersgd_rank"]} if "powersgd_rank" in options else {}
        compress_gradients(wrapped, compression, **rank)
    return wrapped
