"""The batches of a rank: its share of the samples, batches of a limited size, and the parts of a batch.

A batch is a tensor, or a tuple, list or mapping of tensors, as data sets and the collators of Hugging Face return them.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join, Joinable

from distflow.train.communication.gradients import drifts
from distflow.train.communication.votes import channel, without_votes
from distflow.train.strategies.description import given_strategy, warn_of_conflict

__all__ = [
    "Arguments",
    "Batch",
    "BatchSizes",
    "DynamicBatcher",
    "as_arguments",
    "balanced_split",
    "batch_sizes",
    "copy_of",
    "cut",
    "equal_batches",
    "join",
    "own_share",
    "sample_count",
    "shape_of",
    "tensors_of",
]


_Sample = TypeVar("_Sample")


class DynamicBatcher(Generic[_Sample]):
    """Collects samples until a batch is full; no sample is split, none is lost.

    ``max_tokens`` counts a batch as it is padded: the number of its samples times the longest of them.
    """

    def __init__(
        self, *, max_samples: int | None = None, max_tokens: int | None = None, length: Callable[[Any], int] = len
    ) -> None:
        """Give at least one limit. ``length`` tells the tokens of a sample. Raises ``ValueError``."""
        if max_samples is None and max_tokens is None:
            raise ValueError("a batch needs a limit: give max_samples, max_tokens, or both")
        for name, value in (("max_samples", max_samples), ("max_tokens", max_tokens)):
            if value is not None and value < 1:
                raise ValueError(f"{name}={value}: give 1 or more")
        self._max_samples, self._max_tokens, self._length = max_samples, max_tokens, length
        self._waiting: list[_Sample] = []
        self._longest = 0

    def add(self, sample: _Sample) -> list[_Sample] | None:
        """Take a sample; return the batch that is full now, if one is.

        Raises ``ValueError`` for a sample that alone is longer than ``max_tokens``.
        """
        tokens = self._length(sample) if self._max_tokens is not None else 0
        if self._max_tokens is not None and tokens > self._max_tokens:
            raise ValueError(f"a sample of {tokens} tokens does not fit max_tokens={self._max_tokens}: cut it, or allow more")
        full = self.flush() if self._waiting and not self._fits(tokens) else None
        self._waiting.append(sample)
        self._longest = max(self._longest, tokens)
        if full is None and len(self._waiting) == self._max_samples:
            full = self.flush()
        return full

    def _fits(self, tokens: int) -> bool:
        count = len(self._waiting) + 1
        if self._max_samples is not None and count > self._max_samples:
            return False
        return self._max_tokens is None or max(self._longest, tokens) * count <= self._max_tokens

    def flush(self) -> list[_Sample] | None:
        """Return what is waiting, if anything is."""
        batch, self._waiting, self._longest = self._waiting, [], 0
        return batch or None

    def batches(self, samples: Iterable[_Sample]) -> list[list[_Sample]]:
        """Return the batches of all samples, the last one flushed."""
        found = [batch for batch in map(self.add, samples) if batch]
        rest = self.flush()
        return [*found, rest] if rest else found


def equal_batches(batches: list[list[_Sample]], *, group: dist.ProcessGroup | None = None) -> list[list[_Sample]]:
    """Return these batches, split so that every rank has as many. Collective.

    A rank with fewer splits its largest ones in two. Only a rank that has fewer samples than others have batches gives some
    of them twice, and warns. Raises ``ValueError``, on all ranks, when one of them has no sample at all.
    """
    if any(not batch for batch in batches):
        raise ValueError("a batch is empty: leave it out")
    group, device = channel(group)
    counts = torch.tensor([len(batches), -sum(map(len, batches))], device=device)
    if dist.is_initialized():
        dist.all_reduce(counts, dist.ReduceOp.MAX, group=group)
    count, fewest = int(counts[0]), -int(counts[1])
    if count and not fewest:
        raise ValueError("a rank has no sample: give every rank at least one")
    result = list(batches)
    while len(result) < count:
        place = max(range(len(result)), key=lambda index: len(result[index]))
        largest = result[place]
        if len(largest) == 1:
            missing = count - len(result)
            warnings.warn(f"this rank has {len(result)} samples for {count} batches: {missing} come twice", stacklevel=2)
            result += [result[index % len(result)] for index in range(missing)]
            break
        middle = -(-len(largest) // 2)
        result[place : place + 1] = [largest[:middle], largest[middle:]]
    return result


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
    warn_of_conflict()
    strategy = given_strategy()
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
    if global_batch_size is None and per_rank_batch_size is None and (strategy := given_strategy()) is not None:
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


Batch = Any
"""A tensor, or tensors in tuples, lists and mappings; anything else in there is given to every part as it is."""


Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""The positional and the named arguments of a model."""


def as_arguments(batch: Batch) -> Arguments:
    """Return what a model is called with: a mapping by names, a tuple or a list one by one, else the batch itself."""
    if isinstance(batch, Mapping):
        return (), dict(batch)
    return (tuple(batch), {}) if isinstance(batch, tuple | list) else ((batch,), {})


def sample_count(batch: Batch) -> int:
    """Return the first dimension of the first tensor. Raises ``ValueError`` where there is no tensor of any dimension."""
    first = next((tensor for _, tensor in tensors_of(batch)), None)
    if first is None:
        raise ValueError("the batch holds no tensor: give a tensor, or a tuple, a list or a mapping of tensors")
    return len(first)


def cut(batch: Batch, count: int, samples: int) -> list[Batch]:
    """Return ``count`` parts along the first dimension, in the same structure.

    Raises ``ValueError`` for a tensor of another length than ``samples``.
    """
    if count == 1:
        return [batch]
    for name, tensor in tensors_of(batch):
        if len(tensor) != samples:
            raise ValueError(
                f"the batch cannot be cut into {count} micro-batches: {name or 'a tensor'} has {len(tensor)} samples, but "
                f"the first tensor has {samples}: give all tensors the same number of samples"
            )
    return [_part(batch, count, number) for number in range(count)]


def shape_of(batch: Batch) -> tuple[torch.Size, ...]:
    """Return the shapes of all tensors, in their order."""
    return tuple(tensor.shape for _, tensor in tensors_of(batch))


def tensors_of(batch: Batch, name: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors that have samples, each with its place."""
    if isinstance(batch, torch.Tensor):
        if batch.dim():
            yield name, batch
    elif isinstance(batch, Mapping):
        for key, value in batch.items():
            yield from tensors_of(value, f"{name}.{key}" if name else str(key))
    elif isinstance(batch, tuple | list):
        for number, value in enumerate(batch):
            yield from tensors_of(value, f"{name}[{number}]")


def copy_of(batch: Batch) -> Batch:
    """Return the batch with copies of its tensors."""
    if isinstance(batch, torch.Tensor):
        return batch.clone()
    if isinstance(batch, Mapping):
        return {key: copy_of(value) for key, value in batch.items()}
    return tuple(map(copy_of, batch)) if isinstance(batch, tuple | list) else batch


def _part(batch: Batch, count: int, number: int) -> Batch:
    if isinstance(batch, torch.Tensor):
        return batch.tensor_split(count)[number] if batch.dim() else batch
    if isinstance(batch, Mapping):
        return {key: _part(value, count, number) for key, value in batch.items()}
    if isinstance(batch, tuple | list):
        return tuple(_part(value, count, number) for value in batch)
    return batch
