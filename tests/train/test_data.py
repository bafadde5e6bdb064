"""Splits, batch sizes, samplers, loaders and batchers, in one process."""

from __future__ import annotations

import ast
import json
import random
import warnings
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

import distflow.train
from distflow.train import (
    DynamicBatcher,
    EpochSampler,
    Loader,
    balanced_split,
    batch_sizes,
    equal_batches,
    finish,
    join,
)
from distflow.train.strategies.description import current_strategy, data_shard, make_strategy, set_current_strategy

pytestmark = [pytest.mark.torch, pytest.mark.timeout(300)]


def test_every_public_name_can_be_imported() -> None:
    assert {"Loader", "init", "launch"} <= {*dir(distflow.train)}
    tree = ast.parse(Path(distflow.train.__file__).read_text())
    imported = {
        name.name: node.module
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("distflow.train.")
        for name in node.names
    }
    lazy = distflow.train._MODULES.items()
    wanted = {name: f"distflow.train.{module}" for name, module in lazy if module != "deprecated"}
    assert imported == wanted, "type checkers find all names that are not deprecated"
    for name in distflow.train._MODULES:
        assert getattr(distflow.train, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        distflow.train.nothing  # noqa: B018


def test_a_split_is_balanced() -> None:
    assert balanced_split(11, 4) == [3, 3, 3, 2]
    assert balanced_split(1023, 8) == [128] * 7 + [127]
    assert balanced_split(2, 4) == [1, 1, 0, 0]
    for n, parts in ((1, 0), (-1, 2)):
        with pytest.raises(ValueError, match="cannot split"):
            balanced_split(n, parts)


def test_batch_sizes_are_computed_per_rank_and_in_total() -> None:
    sizes = batch_sizes(global_batch_size=256, shares=8, accumulation=2)
    assert (sizes.per_rank, sizes.total, sizes.shares, sizes.accumulation) == (16, 256, 8, 2)
    assert batch_sizes(per_rank_batch_size=16, shares=8).total == 128
    assert batch_sizes(per_rank_batch_size=64).total == 64, "one rank"


def test_a_per_rank_batch_size_that_looks_like_the_global_one_causes_a_warning() -> None:
    with pytest.warns(UserWarning, match=r"256 is 32 x 8 ranks.*2048 samples.*global_batch_size=256"):
        batch_sizes(per_rank_batch_size=256, shares=8)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        batch_sizes(per_rank_batch_size=256, global_batch_size=2048, shares=8)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"global_batch_size": 100, "shares": 8}, "multiple of 8, such as 96"),
        ({"global_batch_size": 64, "per_rank_batch_size": 16, "shares": 8}, "make 128; give only one"),
        ({"shares": 8}, "give global_batch_size or per_rank_batch_size: no strategy sets a batch size"),
        ({"per_rank_batch_size": 0}, "per_rank_batch_size=0: give 1 or more"),
    ],
)
def test_wrong_batch_sizes_are_explained(given: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        batch_sizes(**given)


@pytest.mark.parametrize(
    ("kind", "options", "sizes"),
    [
        # The sizes: the batch of each share's loader, and all samples of a step.
        ("ddp", {"global_batch_size": 16}, (4, 16)),
        ("tp", {"global_batch_size": 16}, (16, 16)),
        ("hybrid", {"tp_size": 2, "global_batch_size": 16}, (8, 16)),
        ("hybrid", {"tp_size": 2, "micro_batch_size": 3, "gradient_accumulation_steps": 2}, (6, 12)),
        ("pipeline", {"stages": 2, "micro_batch_size": 3, "micro_batches": 4}, (12, 24)),
        ("pipeline", {"global_batch_size": 16, "micro_batch_size": 4, "micro_batches": 4}, (16, 16)),
    ],
)
def test_batch_sizes_come_from_the_strategy(
    tmp_path: Path, kind: str, options: dict[str, int], sizes: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        monkeypatch.setattr(dist, "get_world_size", lambda: 4)
        set_current_strategy(make_strategy(kind, 4, options), rank=0)
        found = batch_sizes()
        assert (found.per_rank, found.total) == sizes
        assert batch_sizes(global_batch_size=32).per_rank == 32 // found.shares, "an argument takes precedence"
        if found.shares == 2:
            with pytest.warns(UserWarning, match=r"128 is 32 x 4 ranks: each of 2 shares.*256 samples"):
                batch_sizes(per_rank_batch_size=128)
        elif found.shares == 1:
            assert batch_sizes(per_rank_batch_size=128).total == 128, "all ranks use the same data"
    finally:
        finish()


def test_finish_resets_the_strategy() -> None:
    set_current_strategy(make_strategy("hybrid", 4, {"tp_size": 2, "gradient_accumulation_steps": 3}), rank=2)
    assert (data_shard(), current_strategy().passes) == ((1, 2), 3)
    finish()
    assert (data_shard({}), current_strategy().kind) == ((0, 1), "none")


def samplers(world_size: int, length: int = 11, **options: Any) -> list[EpochSampler]:
    return [EpochSampler(length, rank=rank, world_size=world_size, **options) for rank in range(world_size)]


def test_an_uneven_number_of_samples_is_padded_by_default_or_kept_or_dropped() -> None:
    padded = [list(sampler) for sampler in samplers(4)]
    assert [len(share) for share in padded] == [3, 3, 3, 3]
    assert {index for share in padded for index in share} == set(range(11))
    kept = [list(sampler) for sampler in samplers(4, uneven="keep")]
    assert [len(share) for share in kept] == balanced_split(11, 4)
    assert sorted(index for share in kept for index in share) == list(range(11))
    dropped = [list(sampler) for sampler in samplers(4, uneven="drop")]
    assert [len(share) for share in dropped] == [2, 2, 2, 2]
    assert [len(list(sampler)) for sampler in samplers(5, 2)] == [1] * 5, "fewer samples than ranks"
    assert all(len(list(sampler)) == len(sampler) for sampler in samplers(3, uneven="keep"))


def test_the_order_changes_with_the_epoch_but_not_with_the_number_of_ranks() -> None:
    (one,) = samplers(1)
    first = list(one)
    one.set_epoch(1)
    assert list(one) != first
    assert sorted(one) == sorted(first)
    two = samplers(2, uneven="keep")
    assert [index for pair in zip(*two, strict=False) for index in pair] == first[:10]
    assert list(EpochSampler(5, shuffle=False)) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_an_epoch_is_resumed_at_the_next_sample_on_any_number_of_ranks(world_size: int) -> None:
    (whole,) = samplers(1)
    before = samplers(2)
    begun = [list(sampler)[:2] for sampler in before]
    before[0].advance(2)
    after = samplers(world_size, uneven="keep")
    for sampler in after:
        sampler.load_state_dict(before[0].state_dict())
    rest = [list(sampler) for sampler in after]
    assert sorted(chain(*begun, *rest)) == list(range(11))
    assert [share[0] for share in rest] == list(whole)[4 : 4 + world_size]


def test_the_state_of_a_different_sampler_is_refused() -> None:
    state = EpochSampler(11, seed=1).state_dict()
    for other in (EpochSampler(12, seed=1), EpochSampler(11, seed=2), EpochSampler(11, seed=1, shuffle=False)):
        with pytest.raises(ValueError, match="the state is of a sampler with"):
            other.load_state_dict(state)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_is_resumed_after_the_last_returned_batch(workers: int) -> None:
    """Workers fetch batches in advance. Only batches that the loader has returned count."""

    def batches(loader: Loader) -> Iterator[tuple[int, list[int]]]:
        for _ in range(3):
            epoch = loader.epoch
            for batch in loader:
                yield epoch, batch.tolist()

    def make() -> Loader:
        return Loader(torch.arange(10), 3, seed=4, num_workers=workers)

    whole = list(batches(make()))
    assert [epoch for epoch, _ in whole] == [0] * 4 + [1] * 4 + [2] * 4
    assert sorted(chain(*(batch for epoch, batch in whole if epoch == 1))) == list(range(10))
    for taken in (2, 4, 5) if not workers else (2,):
        one, other = make(), make()
        source = batches(one)
        for _ in range(taken):
            next(source)
        other.load_state_dict(one.state_dict())
        assert len(other) == 4 - taken % 4
        assert list(batches(other))[: 12 - taken] == whole[taken:]


class RandomDataset(torch.utils.data.Dataset[list[float]]):
    """A dataset that draws random numbers for each sample, as random crops do. A worker must open it first."""

    opened = False

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> list[float]:
        assert self.opened
        return [index, torch.rand(()).item(), random.random(), np.random.rand()]


def open_dataset(_worker: int) -> None:
    info = torch.utils.data.get_worker_info()
    assert info is not None
    assert isinstance(info.dataset, RandomDataset)
    info.dataset.opened = True


def test_random_numbers_of_workers_are_resumed_too() -> None:
    """The numbers do not depend on the number of workers and ranks."""

    def make(workers: int, rank: int = 0, world_size: int = 1) -> Loader:
        options: dict[str, Any] = {"num_workers": workers, "worker_init_fn": open_dataset, "collate_fn": list}
        return Loader(RandomDataset(), 2, seed=4, rank=rank, world_size=world_size, **options)

    one = make(1)
    whole = [list(one), list(one)]
    assert len({tuple(sample[1:]) for epoch in whole for batch in epoch for sample in batch}) == 24
    again = make(2)
    source = iter(again)
    taken = [next(source), next(source)]
    other = make(1)
    other.load_state_dict(again.state_dict())
    assert [*taken, *other] == whole[0]
    assert list(other) == whole[1]
    parts = [list(chain(*make(1, rank, 2))) for rank in (0, 1)]
    assert list(chain(*zip(*parts, strict=True))) == list(chain(*whole[0]))


def test_a_loader_does_not_change_the_random_state_of_the_training() -> None:
    torch.manual_seed(0)
    before = torch.get_rng_state()
    list(Loader(torch.arange(10), 3))
    assert torch.equal(torch.get_rng_state(), before)


def test_a_loader_refuses_invalid_arguments() -> None:
    with pytest.raises(ValueError, match="omit drop_last, sampler, which the loader decides"):
        Loader([1, 2], 1, sampler=[0], drop_last=True)  # type: ignore[call-arg]
    with pytest.raises(ValueError, match="the dataset is empty"):
        Loader([], 1)
    with pytest.raises(ValueError, match="uneven='join': give \"pad\""):
        Loader([1], 1, uneven="join")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="no length"):
        Loader(iter([1]), 1)  # type: ignore[arg-type]


def test_join_refuses_a_plain_module() -> None:
    with pytest.raises(TypeError, match=r"Linear.*uneven=\"pad\""):
        join(nn.Linear(1, 1))


def test_a_batcher_fills_batches_by_count() -> None:
    batcher: DynamicBatcher[str] = DynamicBatcher(max_samples=2)
    assert batcher.add("a") is None
    assert batcher.add("b") == ["a", "b"]
    assert batcher.add("c") is None
    assert batcher.flush() == ["c"]
    assert batcher.flush() is None


def test_a_batcher_counts_tokens_with_padding() -> None:
    batcher: DynamicBatcher[str] = DynamicBatcher(max_tokens=12)
    samples = ["aaaa", "bb", "cccccc", "d", "ee", "ffff", "gggggggggggg"]
    batches = batcher.batches(samples)
    assert batches == [["aaaa", "bb"], ["cccccc", "d"], ["ee", "ffff"], ["gggggggggggg"]]
    assert all(len(batch) * max(map(len, batch)) <= 12 for batch in batches)


def test_a_batcher_respects_both_limits() -> None:
    batcher: DynamicBatcher[str] = DynamicBatcher(max_samples=1, max_tokens=4)
    assert batcher.batches(["aaa", "bbb", "c"]) == [["aaa"], ["bbb"], ["c"]]
    batches = DynamicBatcher[str](max_samples=3, max_tokens=4).batches(["a", "bbbb", "c", "d", "e", "f"])
    assert batches == [["a"], ["bbbb"], ["c", "d", "e"], ["f"]]


def test_invalid_limits_and_batches_are_refused() -> None:
    with pytest.raises(ValueError, match="a batch needs a limit: give max_samples, max_tokens, or both"):
        DynamicBatcher()
    with pytest.raises(ValueError, match="max_tokens=0"):
        DynamicBatcher(max_tokens=0)
    with pytest.raises(ValueError, match="5 tokens does not fit max_tokens=4"):
        DynamicBatcher[str](max_tokens=4).add("aaaaa")
    with pytest.raises(ValueError, match="a batch of a rank is empty"):
        equal_batches([[1], []])
    assert equal_batches([[1, 2], [3]]) == [[1, 2], [3]], "one rank"


def test_ranks_that_share_a_tensor_get_the_same_samples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mesh = {"kind": "hybrid", "mesh": {"shape": [2, 2], "names": ["fsdp", "tp"]}}
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        assert (EpochSampler(8).rank, EpochSampler(8).world_size) == (0, 1)
        monkeypatch.setenv("DISTFLOW_STRATEGY", json.dumps(mesh))
        shares = []
        for rank in range(4):
            monkeypatch.setattr(dist, "get_rank", lambda rank=rank: rank)
            sampler = Loader(list(range(8)), 2).sampler
            shares.append((sampler.rank, sampler.world_size))
        assert shares == [(0, 2), (0, 2), (1, 2), (1, 2)]
        assert EpochSampler(8, rank=3, world_size=4).world_size == 4
    finally:
        monkeypatch.undo()
        dist.destroy_process_group()
