"""The repeated layers of a model: what FSDP gathers at once, and what activation checkpointing computes again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from functools import partial
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

__all__ = ["checkpoint_activations", "large_modules", "repeated_layers"]

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
