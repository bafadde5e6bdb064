"""Initialize models that were created on torch's meta device, so that no rank has to hold the whole model.

The model is divided first. Then its modules are initialized one by one, children before parents: rank 0 calls, for example,
``reset_parameters`` and broadcasts the tensors, and each rank keeps its part. A rank thus holds its part of the model and one
whole module. The values depend only on rank 0's random numbers, not on the strategy or the number of ranks.

Source: "Meta device and parameter initialization" of torch's FSDP tutorial. The tutorial initializes shards in place, so
their values depend on how the model is divided. https://docs.pytorch.org/tutorials/intermediate/FSDP_tutorial.html
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator
from functools import partial
from itertools import chain

import torch
import torch.distributed as dist
from torch import nn

__all__ = ["allocate", "fill", "is_on_meta_device", "tied_names"]

_METHODS = ("reset_parameters", "_reset_parameters", "init_weights")
"""Methods by which modules initialize their own tensors; the second is that of torch's attention."""


def is_on_meta_device(model: nn.Module, loaded: Collection[str] = ()) -> bool:
    """Return whether the model is on the meta device.

    ``loaded`` are the names of tensors that are read from files. Raises ``ValueError``, on all ranks, if only a part of the
    model is on the meta device, or if a module has no method that initializes its other tensors.
    """
    meta = {tensor.is_meta for module in model.modules() for tensor in _own(module).values()}
    if True not in meta:
        return False
    if False in meta:
        other = next(name for name, tensor in chain(model.named_parameters(), model.named_buffers()) if not tensor.is_meta)
        raise ValueError(f"the model is only partly on the meta device: {other} is not; create the whole model on one device")
    if unable := [name or "the model itself" for name, _, initialize in _to_fill(model, loaded) if initialize is None]:
        raise ValueError(
            f"modules on the meta device need reset_parameters() or init_weights() to initialize their own tensors; "
            f"modules without these methods: {', '.join(unable)}; add one to them, or create the model on a real device"
        )
    return True


def tied_names(model: nn.Module) -> list[list[str]]:
    """Return one list of names for each tied parameter, in the order of the modules."""
    names = defaultdict(list)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names[id(parameter)].append(name)
    return [several for several in names.values() if len(several) > 1]


def allocate(module: nn.Module, device: torch.device, *, offload: bool = False) -> nn.Module:
    """Allocate uninitialized memory for a module on the meta device; leave any other unchanged. Return the module.

    With ``offload``, parameters are in CPU memory, as FSDP requires, and only buffers are on the device. Tied parameters stay
    tied.
    """
    if any(tensor.is_meta for tensor in chain(module.parameters(), module.buffers())):
        tied = tied_names(module)
        module.to_empty(device="cpu" if offload else device)
        for first, *others in tied:
            for name in others:
                owner, _, attribute = name.rpartition(".")
                setattr(module.get_submodule(owner), attribute, module.get_parameter(first))
        for part in module.modules():
            for name, buffer in part.named_buffers(recurse=False):
                setattr(part, name, buffer.to(device))
    return module


def fill(model: nn.Module, device: torch.device, loaded: Collection[str] = ()) -> nn.Module:
    """Initialize every module with the values that rank 0 draws on ``device``, and return the model.

    Collective: each rank passes the whole model. Tensors on the meta device stay there, because other ranks hold them.
    Only modules whose tensors are all in ``loaded`` are skipped. A module cannot initialize its children. Raises ``ValueError``
    for a module that does not initialize all of its floating-point tensors.
    """
    many = dist.is_initialized() and dist.get_world_size() > 1
    for name, module, initialize in _to_fill(model, loaded):
        kept = _own(module)
        drawn = {one: torch.empty(tensor.shape, dtype=tensor.dtype, device=device) for one, tensor in kept.items()}
        if initialize is not None and (not many or dist.get_rank() == 0):
            _draw(module, initialize, drawn)
        for one, tensor in drawn.items():
            if many:
                dist.broadcast(tensor, 0)
            if tensor.is_floating_point() and tensor.isnan().any():
                is_by_model = isinstance(initialize, partial)
                method = "the model's _init_weights()" if is_by_model else "reset_parameters() or init_weights()"
                raise ValueError(
                    f"the tensor {one} of {name or 'the model'} ({type(module).__name__}) is not initialized: "
                    f"set it in {method}, or do not create the model on the meta device"
                )
            if not kept[one].is_meta:
                _keep(kept[one], tensor)
    return model


def _draw(module: nn.Module, initialize: Callable[[], object], drawn: dict[str, torch.Tensor]) -> None:
    """Run ``initialize`` on ``drawn`` instead of the module's own tensors; meanwhile, its children are on the meta device.

    Floating-point values that it does not set are NaN afterwards.
    """
    own = {part: _own(part) for part in module.modules()}
    for part, tensors in own.items():
        for name, tensor in tensors.items():
            new = drawn[name] if part is module else torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
            if new.is_floating_point():
                new.fill_(float("nan"))
            setattr(part, name, nn.Parameter(new, requires_grad=False) if isinstance(tensor, nn.Parameter) else new)
    try:
        with torch.no_grad():
            initialize()
    finally:
        for part, tensors in own.items():
            for name, tensor in tensors.items():
                setattr(part, name, tensor)


def _keep(kept: torch.Tensor, drawn: torch.Tensor) -> None:
    """Copy a whole tensor, or this rank's part of it, into ``kept``."""
    from torch.distributed.tensor import DTensor, distribute_tensor  # noqa: PLC0415  it takes a second to import

    if isinstance(kept, DTensor):
        # Without a source rank, every rank takes its part of its own copy, and nothing is sent.
        drawn = distribute_tensor(drawn, kept.device_mesh, kept.placements, src_data_rank=None).to_local()
        kept = kept.to_local()
    with torch.no_grad():
        kept.copy_(drawn)


def _own(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return the parameters and buffers of a module, without those of its children."""
    return {**dict(module.named_parameters(recurse=False)), **dict(module.named_buffers(recurse=False))}


_Initialize = Callable[[], object]


def _to_fill(
    model: nn.Module, loaded: Collection[str], prefix: str = "", outer: Callable[[nn.Module], object] | None = None
) -> Iterator[tuple[str, nn.Module, _Initialize | None]]:
    """Yield name, module and initializer of modules with tensors that are not in ``loaded``, children first."""
    # This method of Hugging Face models initializes any one of their modules.
    outer = getattr(model, "_init_weights", outer) if hasattr(model, "base_model_prefix") else outer
    for name, child in model.named_children():
        yield from _to_fill(child, loaded, f"{prefix}{name}.", outer)
    if any(f"{prefix}{name}" not in loaded for name in _own(model)):
        own = next((getattr(model, name) for name in _METHODS if callable(getattr(model, name, None))), None)
        yield prefix.rstrip("."), model, own if outer is None else partial(outer, model)
