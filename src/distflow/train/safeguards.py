"""Steps that all ranks take, or none: out of memory on one rank, and gradients that are no numbers.

A rank that alone skips a step leaves the others in a reduction that never ends. Here every rank says how it fared, and all
decide alike. Other errors are not voted on: they go on at once, the launcher stops the world, and no rank waits in a barrier.
"""

from __future__ import annotations

from collections.abc import Iterable
from types import TracebackType

import torch
import torch.distributed as dist
from torch import nn

from distflow.train.votes import all_ranks

__all__ = ["GradientGuard", "MemoryGuard", "NonFiniteGradients", "OutOfMemory"]


class OutOfMemory(RuntimeError):
    """Ranks ran out of memory in too many steps in a row."""


class NonFiniteGradients(RuntimeError):
    """Gradients were infinite or no numbers, and that was not to be passed over."""


class MemoryGuard:
    """Lets all ranks skip a step when one of them has no memory for it.

    In the loop::

        guard = MemoryGuard()
        for batch in loader:
            with guard:
                loss = loss_of(model(batch))
            if guard.skipped:
                optimizer.zero_grad()
                continue
            loss.backward()

    Every rank enters and leaves the block in every step: leaving it is a collective. The block must hold no reductions of its
    own: the forward pass of a model in ``DistributedDataParallel``, but no backward pass, and no forward pass of a sharded
    model, where the other ranks would wait inside it.

    It begins with that pass: a model with buffers (``BatchNorm``) is sent rank 0's there, and a rank that had no memory before
    it, to bring the batch to its GPU, would leave the others waiting.
    """

    def __init__(self, limit: int = 10, *, group: dist.ProcessGroup | None = None) -> None:
        """``limit``: how many steps in a row may be skipped before ``OutOfMemory`` is raised, on all ranks."""
        self.skipped = False
        """Whether the last step is to be skipped, by all."""
        self.count = 0
        """How many steps were skipped."""
        self.mine = 0
        """How many times it was this rank that had no memory."""
        self._limit, self._group, self._in_a_row = limit, group, 0

    def __enter__(self) -> MemoryGuard:
        """Begin a step."""
        self.skipped = False
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> bool:
        """Vote, unless another error goes through."""
        if error is not None and not isinstance(error, torch.OutOfMemoryError):
            return False
        failed = error is not None
        if failed:
            self.mine += 1
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
        self.skipped = not all_ranks(not failed, group=self._group)
        self._in_a_row = self._in_a_row + 1 if self.skipped else 0
        self.count += self.skipped
        if self._in_a_row > self._limit:
            raise OutOfMemory(
                f"{self._in_a_row} steps in a row had no memory on some rank: use smaller batches, more accumulation, or "
                "activation checkpointing"
            ) from error
        return failed


class GradientGuard:
    """Tells on all ranks alike whether the gradients are numbers: ``if guard.finite(model): optimizer.step()``."""

    def __init__(self, limit: int = 10, *, group: dist.ProcessGroup | None = None) -> None:
        """``limit``: how many steps in a row may be bad before ``NonFiniteGradients`` is raised; 0: the first one raises."""
        self.count = 0
        """How many steps had bad gradients."""
        self._limit, self._group, self._in_a_row = limit, group, 0

    def finite(self, parameters: nn.Module | Iterable[nn.Parameter]) -> bool:
        """Return whether every gradient of every rank is finite. Collective; raises ``NonFiniteGradients`` on all ranks."""
        if isinstance(parameters, nn.Module):
            parameters = parameters.parameters()
        gradients = [_local(parameter.grad) for parameter in parameters if parameter.grad is not None]
        good = not gradients or bool(torch.stack([gradient.isfinite().all().cpu() for gradient in gradients]).all())
        if all_ranks(good, group=self._group):
            self._in_a_row = 0
            return True
        self.count += 1
        self._in_a_row += 1
        if self._in_a_row > self._limit:
            raise NonFiniteGradients(
                f"gradients were not finite in {self._in_a_row} steps in a row: lower the learning rate, clip the gradients, "
                "or look at the data of these steps"
            )
        return False


def _local(gradient: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a gradient; DTensors alone have a way to it."""
    to_local = getattr(gradient, "to_local", None)
    return gradient if to_local is None else torch.as_tensor(to_local())
