"""Decisions that all ranks make together: to skip a step, and to stop.

If only one rank skipped a step or left the loop, the others would wait for it in a reduction. Therefore all ranks vote on
out-of-memory errors, gradients that are not finite, and requests to stop. Other errors are raised at once and end the world.
"""

from __future__ import annotations

import signal
from collections.abc import Iterable
from datetime import timedelta
from types import FrameType, TracebackType

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from distflow.train.communication.gradients import local_gradients
from distflow.train.communication.votes import all_ranks, any_rank
from distflow.train.launcher.rank_processes import STOPPED

__all__ = ["STOPPED", "GradientGuard", "MemoryGuard", "NonFiniteGradients", "OutOfMemory", "listen_for_stop", "stop_requested"]


class OutOfMemory(RuntimeError):
    """Ranks ran out of memory in too many steps in a row, or when the other ranks could not vote."""


class NonFiniteGradients(RuntimeError):
    """Gradients were infinite or NaN in too many steps in a row."""


class MemoryGuard:
    """Lets all ranks skip a step when one of them runs out of memory.

    In the loop::

        guard = MemoryGuard()
        for batch in loader:
            with guard:
                loss = loss_of(model(batch))
            if guard.skipped:
                optimizer.zero_grad()
                continue
            loss.backward()

    All ranks must enter the block in every step. They vote when they leave it, and before each call of a model in
    ``DistributedDataParallel``, which may begin with collectives. The guard therefore also handles a rank that runs out of
    memory before such a call, for example when it moves the batch to the GPU.

    A rank that runs out of memory while others wait in a collective (the backward pass, or the forward pass of a sharded model)
    gets no votes. It raises ``OutOfMemory`` after ``timeout`` seconds, which ends the world.
    """

    def __init__(self, limit: int = 10, *, group: dist.ProcessGroup | None = None, timeout: float = 300.0) -> None:
        """After more than ``limit`` skipped steps in a row, all ranks raise ``OutOfMemory``.

        ``timeout`` (seconds) limits the time that a rank without memory waits for the votes of the other ranks.
        """
        self.skipped = False
        """Whether all ranks skip the last step."""
        self.count = 0
        """Number of skipped steps."""
        self.mine = 0
        """Number of steps in which this rank ran out of memory."""
        self._limit, self._group, self._in_a_row = limit, group, 0
        self._timeout = timedelta(seconds=timeout)
        self._is_inside = False
        self._models: list[nn.Module] = []
        """The models in DDP whose calls begin with a vote; in the first step, the models called so far."""
        self._all_calls: RemovableHandle | None = None
        """The hook on calls of all modules.

        Each step registers it, until all ranks have completed a step that calls a model in DDP.
        """

    def __enter__(self) -> MemoryGuard:
        """Begin a step."""
        self.skipped, self._is_inside = False, True
        if not self._models:
            self._all_calls = register_module_forward_pre_hook(self._before_call)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> bool:
        """Vote on the step, unless the ranks have voted to skip it, or an error other than an out-of-memory error is raised."""
        self._is_inside = False
        models, is_first_step = self._models, self._all_calls is not None
        if self._all_calls is not None:
            self._all_calls.remove()
            self._models, self._all_calls = [], None
        if error is not None and not isinstance(error, (torch.OutOfMemoryError, _SkippedByOthers)):
            return False
        if isinstance(error, torch.OutOfMemoryError):
            self.mine += 1
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            self._vote_to_skip(error)
        self.skipped = error is not None or not all_ranks(True, group=self._group)
        if is_first_step and not self.skipped:
            self._models = models
            for model in models:
                model.register_forward_pre_hook(self._before_call)
        self._in_a_row = self._in_a_row + 1 if self.skipped else 0
        self.count += self.skipped
        if self._in_a_row > self._limit:
            raise OutOfMemory(
                f"some rank ran out of memory in {self._in_a_row} steps in a row: use smaller batches, more gradient "
                "accumulation steps, or activation checkpointing"
            ) from error
        return error is not None

    def _before_call(self, module: nn.Module, _: object) -> None:
        """Vote before a model in DDP is called. Raises ``_SkippedByOthers`` when another rank has run out of memory."""
        if not self._is_inside or not isinstance(module, DistributedDataParallel):
            return
        if self._all_calls is not None and module not in self._models:
            self._models.append(module)
        if not all_ranks(True, group=self._group):
            raise _SkippedByOthers

    def _vote_to_skip(self, error: torch.OutOfMemoryError) -> None:
        """Vote to skip the step. Raises ``OutOfMemory`` if other ranks do not vote."""
        try:
            all_ranks(False, group=self._group, timeout=self._timeout)
        except RuntimeError as why:
            raise OutOfMemory(
                "this rank ran out of memory, and could not agree with the other ranks to skip the step (limit: "
                f"{self._timeout.total_seconds():g} s): {str(why).splitlines()[0]}. The other ranks may be waiting in a "
                "collective inside the `with` block of MemoryGuard: move the backward pass and sharded models out of this "
                "block, or use smaller batches"
            ) from error


class _SkippedByOthers(Exception):
    """Ends the block of a rank before its forward pass, because another rank ran out of memory."""


class GradientGuard:
    """Checks on all ranks together whether gradients are finite: ``if guard.finite(model): optimizer.step()``."""

    def __init__(self, limit: int = 10, *, group: dist.ProcessGroup | None = None) -> None:
        """``finite`` raises ``NonFiniteGradients`` after more than ``limit`` steps in a row with infinite or NaN gradients."""
        self.count = 0
        """Number of steps with gradients that are not finite."""
        self._limit, self._group, self._in_a_row = limit, group, 0

    def finite(self, parameters: nn.Module | Iterable[nn.Parameter]) -> bool:
        """Return whether every gradient of every rank is finite. Collective; raises ``NonFiniteGradients`` on all ranks."""
        if isinstance(parameters, nn.Module):
            parameters = parameters.parameters()
        gradients = local_gradients(parameters)
        good = not gradients or bool(torch.stack([gradient.isfinite().all().cpu() for gradient in gradients]).all())
        if all_ranks(good, group=self._group):
            self._in_a_row = 0
            return True
        self.count += 1
        self._in_a_row += 1
        if self._in_a_row > self._limit:
            raise NonFiniteGradients(
                f"gradients were not finite in {self._in_a_row} steps in a row: lower the learning rate, clip the gradients, "
                "or check the data of these steps"
            )
        return False


_has_stop_signal = False
"""Whether this process got SIGTERM or SIGINT."""
_listening = False


def listen_for_stop() -> None:
    """Treat SIGTERM and SIGINT as requests to stop, instead of ending. Call it in the main thread."""
    global _listening  # noqa: PLW0603 (a process has one handler)
    if not _listening:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, _record_request)
        _listening = True


def stop_requested(group: dist.ProcessGroup | None = None) -> bool:
    """Return whether any rank was asked to stop. Collective: every rank calls it once per step.

    From the first call on, SIGTERM and SIGINT no longer end the process.
    """
    listen_for_stop()
    return any_rank(_has_stop_signal, group=group)


def _record_request(_number: int, _frame: FrameType | None) -> None:
    global _has_stop_signal  # noqa: PLW0603
    _has_stop_signal = True
