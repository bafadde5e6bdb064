"""A data loader that gives each rank its share of every epoch, and that can resume in the middle of an epoch."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypedDict, cast

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset, Sampler, get_worker_info

from distflow.train.loading.batching import own_share
from distflow.train.torch_private import set_worker_dataset

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["EpochSampler", "Loader", "LoaderOptions", "Samples", "Uneven"]

Uneven = Literal["pad", "keep", "drop"]
"""How to distribute samples that do not divide evenly over the ranks. ``pad`` repeats the first samples of the epoch, ``keep``
gives some ranks one sample fewer (wrap the training in ``join``), and ``drop`` omits the last samples."""


class LoaderOptions(TypedDict, total=False):
    """The options of torch's ``DataLoader`` that ``Loader`` passes on."""

    num_workers: int
    collate_fn: Callable[[list[Any]], Any]
    pin_memory: bool
    timeout: float
    """Seconds."""
    worker_init_fn: Callable[[int], None]
    multiprocessing_context: Any
    prefetch_factor: int
    persistent_workers: bool


class Samples(Protocol):
    """A collection of numbered samples: a list, a tensor, or a ``Dataset`` with a length."""

    def __len__(self) -> int:
        """Return the number of samples."""

    def __getitem__(self, index: int, /) -> Any:
        """Return a sample."""


class EpochSampler(Sampler[int]):
    """Yields the indices of this rank's samples of an epoch, in an order that depends on length, shuffle, seed and epoch.

    All ranks share this order and take samples from it in turn, so any number of ranks can resume an epoch at ``position``.
    """

    def __init__(
        self, length: int, *, shuffle: bool = True, seed: int = 0, uneven: Uneven = "pad", rank: int | None = None,
        world_size: int | None = None,
    ) -> None:  # fmt: skip
        """``rank`` and ``world_size`` default to the strategy's data share (``data_shard``), else to the process group.

        Ranks of one tensor-parallel or sequence-parallel group, and the stages of one pipeline, take the same samples. Raises
        ``ValueError`` for an invalid argument or an empty dataset.
        """
        if length < 1:
            raise ValueError("the dataset is empty: give one with at least one sample")
        if uneven not in ("pad", "keep", "drop"):
            raise ValueError(f'uneven={uneven!r}: give "pad", "keep" or "drop"')
        self._by_strategy = rank is None and world_size is None
        own = own_share() if rank is None or world_size is None else (rank, world_size)
        self.length, self.shuffle, self.seed, self.uneven = length, shuffle, seed, uneven
        self.rank = own[0] if rank is None else rank
        self.world_size = own[1] if world_size is None else world_size
        if not 0 <= self.rank < self.world_size:
            raise ValueError(
                f"rank={self.rank} must be at least 0 and below world_size={self.world_size}, the number of ranks with "
                "different samples"
            )
        self.epoch = 0
        self.position = 0
        """Number of samples of the epoch that all ranks together have taken."""

    def __iter__(self) -> Iterator[int]:
        """Yield this rank's remaining indices. Raises ``ValueError`` if the strategy's share has changed."""
        if self._by_strategy and dist.is_initialized() and (own := own_share()) != (self.rank, self.world_size):
            raise ValueError(
                f"the loader was created for share {self.rank} of {self.world_size} of the data, but this rank now has share "
                f"{own[0]} of {own[1]}: create it after init() and parallelize(), or give rank and world_size"
            )
        return iter(self._remaining()[self.rank :: self.world_size])

    def __len__(self) -> int:
        """Return the number of remaining indices of this rank in the epoch."""
        return len(range(self.rank, self.left, self.world_size))

    @property
    def left(self) -> int:
        """The number of remaining samples of all ranks in the epoch, with padding, and without dropped samples."""
        rest = self.length - self.position
        if self.uneven == "pad":
            return -(-rest // self.world_size) * self.world_size
        return rest // self.world_size * self.world_size if self.uneven == "drop" else rest

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch. If it is the current epoch, it continues."""
        if epoch != self.epoch:
            self.epoch, self.position = epoch, 0

    def advance(self, samples: int) -> None:
        """Record that every rank has taken ``samples`` more samples, or fewer at the end of the epoch."""
        self.position = min(self.length, self.position + samples * self.world_size)

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the data, which is the same on every rank."""
        return {
            "epoch": self.epoch, "position": self.position, "length": self.length, "seed": self.seed, "shuffle": self.shuffle,
        }  # fmt: skip

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue at the position of another sampler. Raises ``ValueError`` if its length, seed or shuffle differs."""
        for name in ("length", "seed", "shuffle"):
            if state[name] != getattr(self, name):
                raise ValueError(
                    f"the state is of a sampler with {name}={state[name]}, but this one has {name}={getattr(self, name)}: use "
                    "the same dataset, seed and shuffle"
                )
        self.epoch, self.position = int(state["epoch"]), int(state["position"])

    def _remaining(self) -> list[int]:
        """Return the remaining indices of all ranks in the epoch, in their order."""
        if self.shuffle:
            generator = torch.Generator()
            generator.manual_seed(self.seed * 1_000_003 + self.epoch)
            order: list[int] = torch.randperm(self.length, generator=generator).tolist()
        else:
            order = list(range(self.length))
        rest = order[self.position :]
        # Padding may need more samples than the epoch has, so it may repeat the first samples more than once.
        while rest and len(rest) < self.left:
            rest += order[: self.left - len(rest)]
        return rest[: self.left]


class Loader:
    """Batches of this rank's samples: ``for batch in loader`` yields the rest of an epoch, and then the next epoch begins.

    The position counts yielded batches, not batches that workers have prefetched. So a state that is saved after a training
    step resumes with the next batch, also on another number of ranks.
    """

    def __init__(
        self, dataset: Dataset[Any] | Samples, batch_size: int, *, shuffle: bool = True, seed: int = 0, uneven: Uneven = "pad",
        rank: int | None = None, world_size: int | None = None, **options: Unpack[LoaderOptions],
    ) -> None:  # fmt: skip
        """``batch_size`` is per rank. ``rank`` and ``world_size``: see ``EpochSampler``. ``options``: see ``DataLoader``.

        Raises ``ValueError`` for an invalid argument or an empty dataset, and ``TypeError`` for a dataset without a length.
        """
        refused = {"sampler", "batch_sampler", "drop_last"} & options.keys()
        if refused:
            raise ValueError(f'omit {", ".join(sorted(refused))}, which the loader decides; see shuffle= and uneven="drop"')
        if not hasattr(dataset, "__len__"):
            raise TypeError(
                "the dataset has no length, so the loader cannot resume it: give it __len__, or use a DataLoader of torch"
            )
        self.sampler = EpochSampler(len(dataset), shuffle=shuffle, seed=seed, uneven=uneven, rank=rank, world_size=world_size)
        self.batch_size = batch_size
        # A separate generator for the seeds of workers leaves the random numbers of the training unchanged.
        self._generator = torch.Generator()
        source, order = cast("Dataset[Any]", dataset), cast("Sampler[Any]", self.sampler)
        if options.get("num_workers"):
            source, order = _Seeded(source, seed), _Positions(self.sampler)
            options["worker_init_fn"] = partial(_begin_worker, options.get("worker_init_fn"))
        self._batches: DataLoader[Any] = DataLoader(
            source, batch_size=batch_size, sampler=order, generator=self._generator, **options
        )

    @property
    def epoch(self) -> int:
        """The epoch that the next batch belongs to, counted from 0."""
        return self.sampler.epoch

    def __len__(self) -> int:
        """Return the number of remaining batches of this rank in the epoch."""
        return (len(self.sampler) + self.batch_size - 1) // self.batch_size

    def __iter__(self) -> Iterator[Any]:
        """Yield the remaining batches of the epoch, then begin the next epoch."""
        sampler = self.sampler
        epoch, begin, done = sampler.epoch, sampler.position, 0
        self._generator.manual_seed(hash((sampler.seed, epoch, begin, sampler.rank)))
        total = len(self)
        for batch in self._batches:
            done += 1
            sampler.position = min(sampler.length, begin + done * self.batch_size * sampler.world_size)
            if done == total:
                sampler.set_epoch(epoch + 1)
            yield batch
        if not done:
            sampler.set_epoch(epoch + 1)

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the data, which is the same on every rank."""
        return self.sampler.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue at the position of another loader. Raises ``ValueError`` if its length, seed or shuffle differs."""
        self.sampler.load_state_dict(state)


# -- random numbers in the loader's workers ---------------------------------------------------------------------------


class _Positions(Sampler[tuple[int, int, int]]):
    """Yields epoch, position and index of each sample. The position in the epoch does not depend on the rank or on a resume."""

    def __init__(self, sampler: EpochSampler) -> None:
        self._sampler = sampler

    def __len__(self) -> int:
        return len(self._sampler)

    def __iter__(self) -> Iterator[tuple[int, int, int]]:
        sampler = self._sampler
        epoch, first, step = sampler.epoch, sampler.position + sampler.rank, sampler.world_size
        return ((epoch, first + number * step, index) for number, index in enumerate(sampler))


class _Seeded(Dataset[Any]):
    """A dataset that seeds random numbers by the epoch and a sample's position, so a resumed epoch draws the same numbers."""

    def __init__(self, dataset: Dataset[Any], seed: int) -> None:
        self.dataset, self._seed = dataset, seed

    def __getitem__(self, place: tuple[int, int, int]) -> Any:
        self._begin(place)
        return self.dataset[place[2]]

    def __getitems__(self, places: list[tuple[int, int, int]]) -> list[Any]:
        """Return a batch. A dataset's own ``__getitems__`` is seeded once, by the first sample's position."""
        together = getattr(self.dataset, "__getitems__", None)
        if together is None:
            return [self[place] for place in places]
        self._begin(places[0])
        return list(together([index for _, _, index in places]))

    def _begin(self, place: tuple[int, int, int]) -> None:
        seed = hash((self._seed, *place[:2])) % 2**32
        torch.manual_seed(seed)
        random.seed(seed)
        if (numpy := sys.modules.get("numpy")) is not None:  # torch has imported it if it is installed
            numpy.random.seed(seed)


def _begin_worker(init: Callable[[int], None] | None, worker: int) -> None:
    """Make ``get_worker_info`` return the program's own dataset, then call the program's ``worker_init_fn``."""
    info = get_worker_info()
    if info is not None and isinstance(info.dataset, _Seeded):
        set_worker_dataset(info.dataset.dataset)
    if init is not None:
        init(worker)
