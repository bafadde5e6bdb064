"""Context parallelism: each rank of an axis ``cp`` computes a part of every sequence, with torch's ring attention.

In ``part_of_sequences``, torch replaces ``scaled_dot_product_attention``; calls must be causal and without a mask. Every rank
gets one piece from the first half of a sequence and one from the last half, so that the work is equal.

Source: Liu et al., "Ring Attention with Blockwise Transformers for Near-Infinite Context", and
https://docs.pytorch.org/tutorials/unstable/context_parallel.html
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from distflow.train.loading.batching import Arguments, Batch, as_arguments, copy_of, tensors_of
from distflow.train.torch_private import has_ring_attention

__all__ = ["check_sequences", "part_of_sequences"]


def check_sequences(model: nn.Module, device: str) -> None:
    """Raise ``ValueError`` if context parallelism does not support the model or the device."""
    if hasattr(model, "base_model_prefix"):
        what = "torch's ring attention does not support attention masks, which Hugging Face models create"
        raise ValueError(f"context parallelism: {what}; use a model without masks, or remove `cp_size`")
    if not has_ring_attention(device):
        what = f"torch {torch.__version__} does not support it on the CPU, which these ranks use"
        raise ValueError(f"context parallelism: {what}; use GPUs, or `sequence_parallel` and `tp_size` instead of `cp_size`")


@contextmanager
def part_of_sequences(mesh: DeviceMesh, inputs: Batch, targets: Batch) -> Iterator[tuple[Arguments, Batch]]:
    """Yield this rank's part of a batch: arguments of the model with ``position_ids``, and targets.

    All tensors have the shape (samples, time, …); time is the same, and a multiple of twice the number of ranks in ``mesh``.
    ``position_ids`` (samples, time) has the positions of the part, which is not contiguous. Run the forward and the backward
    pass in this context. Raises ``ValueError`` for other shapes.
    """
    from torch.distributed.tensor.experimental import context_parallel  # noqa: PLC0415  it takes a second to import

    arguments, named = as_arguments(inputs)
    tensors = [tensor for _, tensor in tensors_of((arguments, named, targets))]
    pieces = 2 * mesh.size()
    shape, lengths = tensors[0].shape, {tensor.shape[1] if tensor.dim() > 1 else 0 for tensor in tensors}
    if len(lengths) > 1 or 0 in lengths or shape[1] % pieces:
        raise ValueError(
            "context parallelism: all tensors of a batch must have the shape (samples, time, …) with one sequence length, a "
            f"multiple of {pieces}: found {', '.join(str(tuple(tensor.shape)) for tensor in tensors)}. Pad "
            "the sequences, and leave out tensors of other shapes"
        )
    positions = torch.arange(shape[1], device=tensors[0].device).expand(shape[:2])
    batch: tuple[Any, Any, Any] = copy_of((arguments, {"position_ids": positions, **named}, targets))
    buffers = [tensor for _, tensor in tensors_of(batch)]
    with context_parallel(mesh, buffers=buffers, buffer_seq_dims=[1] * len(buffers), no_restore_buffers=set(buffers)):
        yield (batch[0], batch[1]), batch[2]
