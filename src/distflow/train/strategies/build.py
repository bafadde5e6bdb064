"""Prepare a model for a training strategy.

FSDP gathers the model's repeated layers one at a time. Activation checkpointing recomputes them in the backward pass.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Collection, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

# Import this before `init`. The default `group=dist.group.WORLD` of its functions is evaluated at import, so a later import
# would keep a reference to the process group (see `world._leave`).
import torch.distributed.nn
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from distflow.train.communication.gradients import compress_gradients
from distflow.train.strategies.description import Strategy
from distflow.train.strategies.initial import allocate, fill, is_on_meta_device
from distflow.train.strategies.stages import Loss, make_pipeline

__all__ = [
    "check_connected",
    "checkpoint_activations",
    "large_modules",
    "make_mesh",
    "make_sequence_mesh",
    "prepare",
    "repeated_layers",
    "replicate",
]


def check_connected() -> None:
    """Raise ``ValueError`` before ``init``."""
    if not dist.is_initialized():
        raise ValueError("the ranks are not connected yet: call `world = train.init()` before `world.parallelize(…)`")


def make_mesh(strategy: Strategy) -> DeviceMesh:
    """Return torch's mesh over all ranks for a strategy. Raises ``ValueError`` before ``init``."""
    check_connected()
    # Ranks that divide sequences (`cp`) also divide the model: FSDP shards it over `cp` and `fsdp`.
    sizes = strategy.mesh
    if (parts := sizes.pop("cp", 1)) > 1:
        sizes["fsdp"] *= parts
    return init_device_mesh(_device().type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))


def make_sequence_mesh(strategy: Strategy) -> DeviceMesh | None:
    """Return the mesh of the ranks that share this rank's sequences (``cp``); ``None`` without this axis. Collective."""
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
    """Return the model on this rank's device, wrapped or divided for the strategy. Collective.

    ``loaded`` are the names of tensors that are read from files afterwards. Raises ``ValueError`` or ``TypeError`` if model,
    strategy and ranks do not fit.
    """
    if isinstance(model, nn.DataParallel) and chosen.world_size > 1:
        raise ValueError(
            "the model is in nn.DataParallel, so each rank would copy it to all GPUs: pass the inner module, `model.module`"
        )
    device = _device()
    if not (is_meta := is_on_meta_device(model, loaded)):
        model = model.to(device)
    if chosen.options.get("activation_checkpointing"):
        checkpoint_activations(model, chosen.options)
    if chosen.kind == "none" or (chosen.world_size == 1 and chosen.kind != "pipeline"):
        return fill(allocate(model, device), device, loaded) if is_meta else model
    mesh = make_mesh(chosen)
    if chosen.kind == "ddp" or chosen.options.get("sharding_strategy") == "NO_SHARD":
        return replicate(fill(allocate(model, device), device, loaded) if is_meta else model, device, chosen.options)
    if not is_meta:
        _broadcast_from_first(model)
    ready = _divide(model, mesh, device, chosen, loss, example)
    if is_meta:
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
    """Return this rank's pipeline stages, or the model with this rank's parts of its tensors."""
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
    """Return this rank's device: its GPU if the ranks use NCCL or are not connected yet, else the CPU."""
    connected = dist.is_initialized()
    if torch.cuda.is_available() and (not connected or "nccl" in str(dist.get_backend_config())):
        local = int(os.environ.get("LOCAL_RANK", "0"))
        # If the launcher makes only one GPU visible to each process, that is the current device.
        return torch.device("cuda", local if local < torch.cuda.device_count() else torch.cuda.current_device())
    return torch.device("cpu")


def _broadcast_from_first(model: nn.Module) -> None:
    """Copy rank 0's parameters and buffers to all ranks, as DDP does on its own."""
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            dist.broadcast(tensor.detach(), 0)


def repeated_layers(model: nn.Module, class_names: Collection[str] = ()) -> list[nn.Module]:
    """Return the modules of the named classes; by default, siblings of the same class that have submodules and parameters.

    The default omits layers that are inside of other layers. Raises ``ValueError`` if a class name matches no module.
    """
    if class_names:
        found = [module for module in model.modules() if type(module).__name__ in class_names]
        if missing := set(class_names) - {type(module).__name__ for module in found}:
            available = sorted({type(module).__name__ for module in model.modules()})
            names = ", ".join(sorted(missing))
            raise ValueError(
                f"transformer_layer_cls: the model has no layer of class {names}: choose from {', '.join(available)}"
            )
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


def large_modules(model: nn.Module, min_parameters: int = 100_000_000) -> list[nn.Module]:
    """Return the modules with at least ``min_parameters`` parameters, inner modules first.

    Parameters of a returned module do not count for the modules around it. The model itself and module containers are omitted.
    """
    found: list[nn.Module] = []

    def visit(module: nn.Module) -> int:
        own = sum(parameter.numel() for parameter in module.parameters(recurse=False))
        own += sum(visit(child) for child in module.children())
        if own < min_parameters or module is model or isinstance(module, nn.ModuleList | nn.ModuleDict):
            return own
        found.append(module)
        return 0

    visit(model)
    return found


def checkpoint_activations(model: nn.Module, options: Mapping[str, Any]) -> None:
    """Keep only the input of each layer, and recompute its activations in the backward pass.

    Raises ``ValueError`` if the model has no repeated layers.
    """
    layers = repeated_layers(model, options.get("transformer_layer_cls", ()))
    if not layers:
        raise ValueError("activation_checkpointing: no repeated layers found; name their class in transformer_layer_cls")
    for layer in layers:
        # A wrapper module would change the names of parameters, also in checkpoints.
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)


def _has_parts(module: nn.Module) -> bool:
    return any(True for _ in module.children()) and any(True for _ in module.parameters())


_DDP_OPTIONS = ("bucket_cap_mb", "static_graph", "find_unused_parameters")


def replicate(model: nn.Module, device: torch.device, options: Mapping[str, Any]) -> nn.Module:
    """Return the model wrapped so that its gradients are averaged over all ranks during the backward pass."""
    if not any(parameter.requires_grad for parameter in model.parameters()):
        _broadcast_from_first(model)  # as DDP does, which refuses a model without trainable parameters
        return model
    settings = {name: options[name] for name in _DDP_OPTIONS if name in options}
    settings["gradient_as_bucket_view"] = options.get("gradient_as_bucket_view", True)
    wrapped = DistributedDataParallel(model, device_ids=[device] if device.type == "cuda" else None, **settings)
    compression = options.get("compression", "none")
    if compression != "none":
        rank = {"rank": options["powersgd_rank"]} if "powersgd_rank" in options else {}
        compress_gradients(wrapped, compression, **rank)
    return wrapped
