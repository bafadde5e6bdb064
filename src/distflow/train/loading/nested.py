"""Batches of one tensor or of several: tuples, lists and mappings, as data sets and Hugging Face's collators make them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

__all__ = ["Batch", "as_arguments", "cut", "sample_count", "shape_of"]

Batch = Any
"""A tensor, or tensors in tuples, lists and mappings; anything else in there is given to every part as it is."""


def as_arguments(batch: Batch) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return what a model is called with: a mapping by names, a tuple or a list one by one, else the batch itself."""
    if isinstance(batch, Mapping):
        return (), dict(batch)
    return (tuple(batch), {}) if isinstance(batch, tuple | list) else ((batch,), {})


def sample_count(batch: Batch) -> int:
    """Return the first dimension of the first tensor. Raises ``ValueError`` where there is no tensor of any dimension."""
    first = next((tensor for _, tensor in _tensors(batch)), None)
    if first is None:
        raise ValueError("the batch holds no tensor: give a tensor, or a tuple, a list or a mapping of tensors")
    return len(first)


def cut(batch: Batch, count: int, samples: int) -> list[Batch]:
    """Return ``count`` parts along the first dimension, in the same structure.

    Raises ``ValueError`` for a tensor of another length than ``samples``.
    """
    if count == 1:
        return [batch]
    for name, tensor in _tensors(batch):
        if len(tensor) != samples:
            raise ValueError(
                f"the batch cannot be cut into {count} micro-batches: {name or 'a tensor'} has {len(tensor)} samples, the "
                f"first tensor {samples}"
            )
    return [_part(batch, count, number) for number in range(count)]


def shape_of(batch: Batch) -> tuple[torch.Size, ...]:
    """Return the shapes of all tensors, in their order."""
    return tuple(tensor.shape for _, tensor in _tensors(batch))


def _tensors(batch: Batch, name: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors that have samples, each with its place."""
    if isinstance(batch, torch.Tensor):
        if batch.dim():
            yield name, batch
    elif isinstance(batch, Mapping):
        for key, value in batch.items():
            yield from _tensors(value, f"{name}.{key}" if name else str(key))
    elif isinstance(batch, tuple | list):
        for number, value in enumerate(batch):
            yield from _tensors(value, f"{name}[{number}]")


def _part(batch: Batch, count: int, number: int) -> Batch:
    if isinstance(batch, torch.Tensor):
        return batch.tensor_split(count)[number] if batch.dim() else batch
    if isinstance(batch, Mapping):
        return {key: _part(value, count, number) for key, value in batch.items()}
    if isinstance(batch, tuple | list):
        return tuple(_part(value, count, number) for value in batch)
    return batch
