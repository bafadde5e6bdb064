"""Batches of samples of different lengths, by count or by tokens, and as many of them on every rank."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist

from distflow.train.communication.votes import channel

__all__ = ["DynamicBatcher", "equal_batches"]

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
            raise ValueError("give max_samples, max_tokens, or both")
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
