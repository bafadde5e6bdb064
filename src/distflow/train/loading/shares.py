"""Arithmetic of data parallelism: who gets how many samples, and what a batch size means."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch.distributed.algorithms.join import Join, Joinable

from distflow.train.communication.gradients import drifts
from distflow.train.communication.votes import without_votes
from distflow.train.strategies.description import said_strategy

__all__ = ["BatchSizes", "balanced_split", "batch_sizes", "join", "own_share"]

_TUTORIAL_BATCH = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSizes:
    """The sizes of one optimizer step, in samples: ``per_rank * shares * accumulation == total``."""

    per_rank: int
    """What one rank's loader gives at a time; without ``accumulation`` also what ``backward`` takes, which cuts it itself."""
    total: int
    """What the gradients of one optimizer step are averaged over."""
    shares: int
    """How many ranks, or groups of ranks, get batches of their own."""
    accumulation: int
    """How many batches each rank takes before the optimizer steps."""


def own_share() -> tuple[int, int]:
    """Return this rank's share of the data and the number of shares; without a strategy its rank and the number of ranks."""
    if not dist.is_initialized():
        return 0, 1
    strategy = said_strategy()
    return (dist.get_rank(), dist.get_world_size()) if strategy is None else strategy.data_shard(dist.get_rank())


def balanced_split(n: int, parts: int) -> list[int]:
    """Split ``n`` things into ``parts`` sizes that differ by one at most, larger ones first: 11 over 4 is 3, 3, 3, 2.

    Raises ``ValueError`` for fewer than one part or a negative ``n``.
    """
    if parts < 1:
        raise ValueError(f"cannot split over {parts} parts: give 1 or more")
    if n < 0:
        raise ValueError(f"cannot split {n} things: give 0 or more")
    share, rest = divmod(n, parts)
    return [share + 1] * rest + [share] * (parts - rest)


def batch_sizes(
    *,
    global_batch_size: int | None = None,
    per_rank_batch_size: int | None = None,
    shares: int | None = None,
    accumulation: int = 1,
) -> BatchSizes:
    """Work out the one batch size from the other, in samples; give both to have them checked, neither for the strategy's.

    ``shares`` is into how many the global batch is divided: default as many as the strategy has (``data_shard``; ranks that
    share a tensor or a pipeline count once), without one the number of ranks. A loader takes the per-rank size. Warns when that
    looks as if it had been multiplied by the world size already (``32 * world_size`` in each of N shares is N times that per
    step). Raises ``ValueError``.
    """
    if shares is None:
        shares = own_share()[1]
    ranks = dist.get_world_size() if dist.is_initialized() else shares
    if global_batch_size is None and per_rank_batch_size is None and (strategy := said_strategy()) is not None:
        global_batch_size = strategy.batch_size
    for name, value in (
        ("global_batch_size", global_batch_size), ("per_rank_batch_size", per_rank_batch_size), ("shares", shares),
        ("accumulation", accumulation),
    ):  # fmt: skip
        if value is not None and value < 1:
            raise ValueError(f"{name}={value}: give 1 or more")
    times = shares * accumulation
    if per_rank_batch_size is None:
        if global_batch_size is None:
            raise ValueError("give global_batch_size or per_rank_batch_size: the strategy says neither")
        if global_batch_size % times:
            near = max(1, round(global_batch_size / times)) * times
            raise ValueError(
                f"global_batch_size={global_batch_size} does not divide evenly over {shares} shares with accumulation "
                f"{accumulation}: give a multiple of {times}, such as {near}"
            )
        per_rank_batch_size = global_batch_size // times
    elif global_batch_size not in (None, per_rank_batch_size * times):
        raise ValueError(
            f"global_batch_size={global_batch_size} is not per_rank_batch_size={per_rank_batch_size} x {shares} shares x "
            f"accumulation {accumulation} = {per_rank_batch_size * times}: leave one of them out"
        )
    elif global_batch_size is None and shares > 1 and per_rank_batch_size == _TUTORIAL_BATCH * ranks:
        warnings.warn(
            f"per_rank_batch_size={per_rank_batch_size} is {_TUTORIAL_BATCH} x {ranks} ranks: each of {shares} shares takes "
            f"that many, so a step has {per_rank_batch_size * times} samples; if {per_rank_batch_size} in all were meant, give "
            f"global_batch_size={per_rank_batch_size}; if not, give both to say so",
            stacklevel=2,
        )
    return BatchSizes(per_rank=per_rank_batch_size, total=per_rank_batch_size * times, shares=shares, accumulation=accumulation)


def join(*parts: Any, enable: bool = True) -> contextlib.AbstractContextManager[Any]:
    """Let ranks have different numbers of batches: those that are done first keep up the others' reductions.

    ``parts``: models in ``DistributedDataParallel``, ``ZeroRedundancyOptimizer``, anything that torch's ``Join`` takes.
    Raises ``TypeError`` for others: a sharded model needs every rank in every forward pass, so give its loader
    ``uneven="pad"``. What all ranks do together (``GradientGuard``, ``MemoryGuard``, ``stop_requested``, ``StepTimer``,
    ``Checkpoints``) raises ``RuntimeError`` inside: ranks that are done first would not answer.
    """
    for part in parts:
        if not isinstance(part, Joinable):
            raise TypeError(
                f"join() cannot handle {type(part).__name__}: it takes models in DistributedDataParallel; for others use a "
                'Loader with uneven="pad", which gives every rank the same number of batches'
            )
        if enable and drifts(part):
            raise TypeError(
                "join() cannot handle a model under local_sgd(), whose averages are not part of its passes: use a Loader with "
                'uneven="pad"'
            )
    return _joined(list(parts)) if enable and dist.get_world_size() > 1 else contextlib.nullcontext()


@contextlib.contextmanager
def _joined(parts: list[Joinable]) -> Iterator[None]:
    said = (
        "inside join(), ranks that finish early do not take part in guards, stop_requested, StepTimer and Checkpoints: "
        'the others would wait forever; use a Loader with uneven="pad", or call them outside'
    )
    with Join(parts), without_votes(said):
        yield
