"""Which strategy a process reads, and which share of the data it takes. No torch."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest

from distflow.layout.strategy import parse_strategy
from distflow.layout.strategyoptions import OPTIONS as CHECKED
from distflow.layout.strategyoptions import Wrong
from distflow.train.strategies.description import CHOICES, OPTIONS, Strategy, current_strategy, data_shard, make_strategy


def test_what_the_spec_says_is_what_a_rank_reads() -> None:
    strategy, _ = parse_strategy({"kind": "hybrid", "tp_size": 2, "mixed_precision": "bf16"}, (2, 2))
    assert strategy is not None
    read = current_strategy({"DISTFLOW_STRATEGY": json.dumps(strategy.normalised())})
    assert (read.kind, read.shape, read.names, read.options) == (
        strategy.kind,
        strategy.shape,
        strategy.names,
        strategy.options,
    )


def test_both_sides_know_the_same_options() -> None:
    assert set(CHECKED) == OPTIONS
    for name, words in CHOICES.items():
        assert [CHECKED[name].check(word) for word in words] == list(words)
        with pytest.raises(Wrong):
            CHECKED[name].check("zip")


@pytest.mark.parametrize(("world", "kind"), [("1", "none"), ("4", "ddp")])
def test_without_a_strategy_ranks_are_replicas(world: str, kind: str) -> None:
    assert current_strategy({"WORLD_SIZE": world}) == make_strategy(kind, int(world))


@pytest.mark.parametrize("text", ["fsdp", "[]", "{}", '{"kind": "ddp", "mesh": 3}'])
def test_another_text_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=f"DISTFLOW_STRATEGY is {re.escape(repr(text))}, not JSON such as"):
        current_strategy({"DISTFLOW_STRATEGY": text})


@pytest.mark.parametrize(
    ("shape", "names", "shares"),
    [
        ((4,), ("dp",), [(0, 4), (1, 4), (2, 4), (3, 4)]),
        ((4,), ("tp",), [(0, 1)] * 4),
        ((2, 2), ("fsdp", "tp"), [(0, 2), (0, 2), (1, 2), (1, 2)]),
        ((2, 2), ("pp", "dp"), [(0, 2), (1, 2), (0, 2), (1, 2)]),
        ((2, 2), ("dp", "fsdp"), [(0, 4), (1, 4), (2, 4), (3, 4)]),
    ],
)
def test_ranks_that_hold_one_model_take_the_same_data(
    shape: tuple[int, ...], names: tuple[str, ...], shares: list[tuple[int, int]]
) -> None:
    strategy = Strategy(kind="x", shape=shape, names=names)
    assert [strategy.data_shard(rank) for rank in range(4)] == shares
    assert data_shard({"RANK": "3", "WORLD_SIZE": "4"}) == (3, 4)


@pytest.mark.parametrize(
    ("kind", "options"),
    [("ddp", {}), ("fsdp", {}), ("tp", {}), ("hybrid", {"tp_size": 2}), ("pipeline", {}), ("pipeline", {"stages": 2}),
     ("fsdp", {"sharding_strategy": "HYBRID_SHARD", "shard_size": 2}), ("none", {})],
)  # fmt: skip
def test_both_sides_mean_the_same_mesh(kind: str, options: dict[str, object]) -> None:
    strategy, problems = parse_strategy({"kind": kind, **options}, (4,))
    made = make_strategy(kind, 4, options)
    assert strategy is not None, problems
    assert (made.shape, made.names, made.options) == (strategy.shape, strategy.names, strategy.options)


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("hybrid", {}, "say tp_size"),
        ("hybrid", {"tp_size": 3}, "tp of 3 does not divide 4 ranks"),
        ("zero", {}, "no strategy 'zero'"),
    ],
)
def test_what_cannot_be_made_is_said(kind: str, options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_strategy(kind, 4, options)


def test_the_share_of_the_data_is_known_without_torch() -> None:
    code = "import sys, distflow.train; distflow.train.data_shard(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
