"""The batches of a rank: its share of the samples, batches of a limited size, and the parts of a batch.

For a model, a batch is a tensor, or a tuple, list or mapping of tensors, as data sets and the collators of Hugging Face return
them. ``DynamicBatcher`` and ``equal_batches`` handle lists of samples, before they are combined.
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

from distflow.train.communication.gradients import uses_local_sgd
from distflow.train.communication.votes import channel, without_votes
from distflow.train.strategies.description import current_strategy_or_none, warn_of_conflict

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
    """Collects samples until a batch is full. It never splits or drops a sample.

    ``max_tokens`` limits the padded size of a batch: the number of samples times the tokens of the longest sample.
    """

    def __init__(
        self, *, max_samples: int | None = None, max_tokens: int | None = None, length: Callable[[Any], int] = len
    ) -> None:
        """Give at least one limit. ``length`` returns the number of tokens of a sample. Raises ``ValueError``."""
        if max_samples is None and max_tokens is None:
            raise ValueError("a batch needs a limit: give max_samples, max_tokens, or both")
        for name, value in (("max_samples", max_samples), ("max_tokens", max_tokens)):
            if value is not None and value < 1:
                raise ValueError(f"{name}={value}: give 1 or more")
        self._max_samples, self._max_tokens, self._length = max_samples, max_tokens, length
        self._waiting: list[_Sample] = []
        self._longest = 0

    def add(self, sample: _Sample) -> list[_Sample] | None:
        """Add a sample. Return a batch if one is full, else ``None``. It lacks this sample if the sample did not fit.

        Raises ``ValueError`` for a sample of more than ``max_tokens``.
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
        # A batch with ``max_samples`` samples never waits, so only the tokens can exceed their limit.
        return self._max_tokens is None or max(self._longest, tokens) * (len(self._waiting) + 1) <= self._max_tokens

    def flush(self) -> list[_Sample] | None:
        """Return the waiting samples as a batch, or ``None`` if there are none."""
        batch, self._waiting, self._longest = self._waiting, [], 0
        return batch or None

    def batches(self, samples: Iterable[_Sample]) -> list[list[_Sample]]:
        """Return the batches of all samples, including the last, incomplete batch."""
        found = [batch for batch in map(self.add, samples) if batch]
        rest = self.flush()
        return [*found, rest] if rest else found


def equal_batches(batches: list[list[_Sample]], *, group: dist.ProcessGroup | None = None) -> list[list[_Sample]]:
    """Split batches until every rank has the same number of batches. Collective.

    A rank with fewer batches than other ranks splits its largest batches in two. If another rank has more batches than this
    rank has samples, this rank repeats some of them, and warns. Raises ``ValueError``, on all ranks, for an empty batch, or if
    only some ranks have samples.
    """
    group, device = channel(group)
    counts = torch.tensor([len(batches), -sum(map(len, batches)), not all(batches)], device=device)
    if dist.is_initialized():
        dist.all_reduce(counts, dist.ReduceOp.MAX, group=group)
    count, fewest = int(counts[0]), -int(counts[1])
    if int(counts[2]):
        raise ValueError("a batch of a rank is empty: leave it out")
    if count and not fewest:
        raise ValueError("a rank has no sample: give every rank at least one")
    result = list(batches)
    while len(result) < count:
        position = max(range(len(result)), key=lambda index: len(result[index]))
        largest = result[position]
        if len(largest) == 1:
            message = f"this rank has {len(result)} samples, but another rank has {count} batches, so this rank repeats samples"
            warnings.warn(f"{message}: give every rank at least {count} samples", stacklevel=2)
            result += [result[index % len(result)] for index in range(count - len(result))]
            break
        middle = -(-len(largest) // 2)
        result[position : position + 1] = [largest[:middle], largest[middle:]]
    return result


_TUTORIAL_BATCH = 32
"""The usual batch size of tutorials. A per-rank size of this number times the ranks is probably meant as a global size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSizes:
    """The sizes of one optimizer step, in samples: ``per_rank * shares * accumulation == total``."""

    per_rank: int
    """Samples in one batch of a rank's loader. ``forward_backward`` of a plan cuts a batch into micro-batches itself."""
    total: int
    """Samples over which the gradients of one optimizer step are averaged."""
    shares: int
    """Number of ranks, or groups of ranks, that get different batches."""
    accumulation: int
    """Number of batches that each rank processes before the optimizer steps."""


def own_share() -> tuple[int, int]:
    """Return the index of this rank's data share and the number of shares. Without a strategy, each rank has one share."""
    if not dist.is_initialized():
        return 0, 1
    warn_of_conflict()
    strategy = current_strategy_or_none()
    return (dist.get_rank(), dist.get_world_size()) if strategy is None else strategy.data_shard(dist.get_rank())


def balanced_split(n: int, parts: int) -> list[int]:
    """Split ``n`` into ``parts`` sizes that differ by at most 1, larger ones first: 11 over 4 is 3, 3, 3, 2.

    Raises ``ValueError`` for fewer than one part or a negative ``n``.
    """
    if parts < 1:
        raise ValueError(f"cannot split over {parts} parts: give 1 or more")
    if n < 0:
        raise ValueError(f"cannot split {n} samples: give 0 or more")
    share, rest = divmod(n, parts)
    return [share + 1] * rest + [share] * (parts - rest)


def batch_sizes(
    *,
    global_batch_size: int | None = None,
    per_rank_batch_size: int | None = None,
    shares: int | None = None,
    accumulation: int = 1,
) -> BatchSizes:
    """Compute one batch size from the other, in samples; give both to check them, or neither to use the strategy's.

    ``shares`` is the number of parts of the global batch. The default is the strategy's (``data_shard``; ranks that share a
    tensor, a sequence or a pipeline count once), or the number of ranks without a strategy. A loader takes the per-rank size.
    Warns if the per-rank size seems to be multiplied by the world size already. Raises ``ValueError``.
    """
    if shares is None:
        shares = own_share()[1]
    ranks = dist.get_world_size() if dist.is_initialized() else shares
    if global_batch_size is None and per_rank_batch_size is None and (strategy := current_strategy_or_none()) is not None:
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
            raise ValueError("give global_batch_size or per_rank_batch_size: no strategy sets a batch size")
        if global_batch_size % times:
            near = max(1, round(global_batch_size / times)) * times
            raise ValueError(
                f"global_batch_size={global_batch_size} does not divide evenly over {shares} data shares (ranks with "
                f"different samples) with accumulation {accumulation}: give a multiple of {times}, such as {near}"
            )
        per_rank_batch_size = global_batch_size // times
    elif global_batch_size not in (None, per_rank_batch_size * times):
        raise ValueError(
            f"global_batch_size={global_batch_size} does not match per_rank_batch_size={per_rank_batch_size}: {shares} shares "
            f"and accumulation {accumulation} make {per_rank_batch_size * times}; give only one of the two sizes"
        )
    elif global_batch_size is None and shares > 1 and per_rank_batch_size == _TUTORIAL_BATCH * ranks:
        warnings.warn(
            f"per_rank_batch_size={per_rank_batch_size} is {_TUTORIAL_BATCH} x {ranks} ranks: each of {shares} shares takes "
            f"{per_rank_batch_size} samples, so a step has {per_rank_batch_size * times} samples. If a step should have "
            f"{per_rank_batch_size} samples, give global_batch_size={per_rank_batch_size} instead; otherwise give both sizes",
            stacklevel=2,
        )
    return BatchSizes(per_rank=per_rank_batch_size, total=per_rank_batch_size * times, shares=shares, accumulation=accumulation)


def join(*parts: Any, enable: bool = True) -> contextlib.AbstractContextManager[Any]:
    """Let ranks have different numbers of batches: ranks that finish early still take part in the reductions.

    ``parts`` are models in ``DistributedDataParallel``, ``ZeroRedundancyOptimizer``, or other ``Joinable`` objects of torch.
    Raises ``TypeError`` for other objects and, with ``enable``, for models under ``local_sgd``. A sharded model needs every
    rank in every forward pass, so give its loader ``uneven="pad"``. Inside, ``GradientGuard``, ``MemoryGuard``,
    ``stop_requested``, ``StepTimer`` and ``Checkpoints`` raise ``RuntimeError``, because ranks that finished early would not
    take part.
    """
    for part in parts:
        if not isinstance(part, Joinable):
            raise TypeError(
                f"join() cannot handle {type(part).__name__}: it takes models in DistributedDataParallel and objects with "
                "torch's interface Joinable; for other models use a "
                'Loader with uneven="pad", which gives every rank the same number of batches'
            )
        if enable and uses_local_sgd(part):
            raise TypeError(
                "join() cannot be used with local_sgd(): a rank that finishes early would be missing when the other ranks "
                'average their parameters; use a Loader with uneven="pad"'
            )
    return _joined(list(parts)) if enable and dist.get_world_size() > 1 else contextlib.nullcontext()


@contextlib.contextmanager
def _joined(parts: list[Joinable]) -> Iterator[None]:
    reason = (
        "inside join(), ranks that finish early do not take part in guards, stop_requested, StepTimer and Checkpoints: "
        'the others would wait forever; use a Loader with uneven="pad", or call them outside'
    )
    with Join(parts), without_votes(reason):
        yield


Batch = Any
"""A tensor, or tensors in tuples, lists and mappings. When it is cut, every part gets the values that have no dimensions."""

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""The positional and the named arguments of a model."""


def as_arguments(batch: Batch) -> Arguments:
    """Return the arguments for a model: named from a mapping, positional from a tuple or list, else the batch itself."""
    if isinstance(batch, Mapping):
        return (), dict(batch)
    return (tuple(batch), {}) if isinstance(batch, tuple | list) else ((batch,), {})


def sample_count(batch: Batch) -> int:
    """Return the length of the first tensor. Raises ``ValueError`` if the batch has no tensor with dimensions."""
    first = next((tensor for _, tensor in tensors_of(batch)), None)
    if first is None:
        raise ValueError(
            "the batch has no tensor with at least one dimension: give a tensor, or a tuple, list or mapping of tensors"
        )
    return len(first)


def cut(name: str, batch: Batch, count: int, samples: int) -> list[Batch]:
    """Cut the batch ``name`` along dimension 0. If ``count`` is above 1, all of its tensors must have length ``samples``."""
    if count == 1:
        return [batch]
    for path, tensor in tensors_of(batch, name):
        if len(tensor) != samples:
            raise ValueError(
                f"the batch cannot be cut into {count} micro-batches: `{path}` has length {len(tensor)}, but "
                f"the first tensor of the inputs has length {samples}; give all tensors the same number of samples"
            )

    def part(number: int) -> Batch:
        return _map_tensors(batch, lambda tensor: tensor.tensor_split(count)[number] if tensor.dim() else tensor)

    return [part(number) for number in range(count)]


def shape_of(batch: Batch) -> tuple[torch.Size, ...]:
    """Return the shapes of the tensors that have dimensions, in their order."""
    return tuple(tensor.shape for _, tensor in tensors_of(batch))


def tensors_of(batch: Batch, name: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors that have dimensions, each with its path in the batch, such as ``inputs[0]``."""
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
    return _map_tensors(batch, torch.clone)


def _map_tensors(batch: Batch, function: Callable[[torch.Tensor], torch.Tensor]) -> Batch:
    if isinstance(batch, torch.Tensor):
        return function(batch)
    if isinstance(batch, Mapping):
        return {key: _map_tensors(value, function) for key, value in batch.items()}
    return tuple(_map_tensors(value, function) for value in batch) if isinstance(batch, tuple | list) else batch
