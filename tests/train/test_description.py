"""The strategy that a process reads, and its share of the data. These tests do not import torch."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from itertools import combinations

import pytest

from distflow.layout.strategy.model import parse_strategy
from distflow.train.strategies.description import Strategy, current_strategy, data_shard, make_strategy, resolve_strategy
from distflow.train.strategies.options import KINDS, MESH_SIZES, OPTIONS


def test_a_rank_reads_the_strategy_of_the_spec() -> None:
    strategy, _ = parse_strategy({"kind": "hybrid", "tp_size": 2, "mixed_precision": "bf16"}, (2, 2))
    assert strategy is not None
    read = current_strategy({"DISTFLOW_STRATEGY": json.dumps(strategy.normalized())})
    assert (read.kind, read.shape, read.names, read.options) == (
        strategy.kind,
        strategy.shape,
        strategy.names,
        strategy.options,
    )


VALUES: dict[str, list[object]] = {
    "bucket_cap_mb": [1, 0], "static_graph": [True, 1], "find_unused_parameters": [True], "gradient_as_bucket_view": [False],
    "compression": ["bf16", "none", "zip"], "powersgd_rank": [2], "sync_gradients_every": [1, 2],
    "sharding_strategy": ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "no_shard", "HALF"],
    "mixed_precision": [True, False, "bf16", "bf17"], "reduce_dtype": ["fp32", "none"], "cpu_offload": [True, False, "yes"],
    "sequence_parallel": [True, "no"],
    "activation_checkpointing": [True], "auto_wrap_policy": ["size", "none", "transformer_layer"],
    "transformer_layer_cls": ["Block", ["Block"], 3], "min_num_params": [1000], "state_dict_type": ["FULL_STATE_DICT"],
    "plan": [{"up": "colwise"}, {"up": "columns"}], "schedule": ["gpipe", "1f1b", "interleaved_1f1b", "2f2b"],
    "stages_per_rank": [1, 2], "split_points": [["one"]],
    "micro_batches": [2, 4], "gradient_accumulation_steps": [2, 0], "micro_batch_size": [3], "global_batch_size": [16, 10],
    "timeout_s": [60, -1], "tp_size": [2, 4, 3], "shard_size": [2], "cp_size": [1, 2], "stages": [2, 8],
}  # fmt: skip
"""Some values of each option, including invalid ones."""


@pytest.mark.parametrize("kind", KINDS)
def test_the_spec_and_the_program_refuse_the_same_options(kind: str) -> None:
    """The spec and `make_strategy` accept and refuse the same pairs of options for 4 ranks."""
    assert set(VALUES) == {*OPTIONS, *MESH_SIZES}
    needed = {"tp_size": 2} if kind == "hybrid" else {}
    single = [(name, value) for name, values in VALUES.items() for value in values]
    refused = 0
    for pair in [*((one,) for one in single), *combinations(single, 2)]:
        options = {**needed, **dict(pair)}
        strategy, problems = parse_strategy({"kind": kind, **options}, (4,))
        made: Strategy | str
        try:
            made = make_strategy(kind, 4, options)
        except ValueError as error:
            made = str(error)
        if strategy is None:
            refused += 1
            assert isinstance(made, str), (options, [problem.message for problem in problems])
        else:
            assert isinstance(made, Strategy), (options, made)
            assert (made.shape, made.names, made.options) == (strategy.shape, strategy.names, strategy.options)
    assert refused > 100


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("ddp", {"cpu_offload": True}, "ddp has no option `cpu_offload`: only sharded parameters"),
        ("hybrid", {"tp_size": 2, "sharding_strategy": "NO_SHARD"}, "hybrid does not support NO_SHARD"),
        ("fsdp", {"mixed_precision": "bf17"}, "mixed_precision is 'bf17': give one of `none`, `bf16`, `fp16`"),
        ("tp", {"tp_size": 2}, "`tp_size` is 2, but the number of ranks is 4"),
        ("ddp", {"bucket_cap": 1}, "a strategy has no option 'bucket_cap': did you mean 'bucket_cap_mb'?"),
    ],
)
def test_invalid_options_are_explained(kind: str, options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        make_strategy(kind, 4, options)


def test_options_added_to_a_strategy_are_checked_with_its_own_options() -> None:
    strategy = make_strategy("fsdp", 2, {"sharding_strategy": "NO_SHARD"})
    assert strategy.having({"timeout_s": 5}).options == {"sharding_strategy": "NO_SHARD", "timeout_s": 5}
    with pytest.raises(ValueError, match="`cpu_offload` needs shards, but NO_SHARD creates none"):
        strategy.having({"cpu_offload": True})
    with pytest.raises(ValueError, match="`tp_size` cannot be set on a Strategy, because its mesh is already defined"):
        strategy.having({"tp_size": 2})


@pytest.mark.parametrize(("world", "kind"), [("1", "none"), ("4", "ddp")])
def test_without_a_strategy_ranks_are_replicas(world: str, kind: str) -> None:
    assert current_strategy({"WORLD_SIZE": world}) == make_strategy(kind, int(world))


@pytest.mark.parametrize("mesh", [{}, {"tp_size": 2}])
def test_an_unknown_kind_is_named(mesh: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"unknown strategy 'dpp': use ddp, .* or none"):
        resolve_strategy(Strategy(kind="dpp", shape=(2,), names=("dp",), options=mesh), 2)


@pytest.mark.parametrize(
    ("kind", "shape", "names", "world", "message"),
    [
        ("ddp", (1,), ("dp",), 8, "the strategy is for 1 rank, but there are 8: start 1 rank"),
        ("hybrid", (2, 4), ("fsdp", "tp"), 4, r"the strategy is for 8 ranks \(2 × 4\), but there are 4: start 8 ranks"),
        ("fsdp", (2,), ("fsdp",), 1, "the strategy is for 2 ranks, but there is 1: start 2 ranks"),
    ],
)
def test_a_strategy_for_another_number_of_ranks_is_refused(
    kind: str, shape: tuple[int, ...], names: tuple[str, ...], world: int, message: str
) -> None:
    strategy = Strategy(kind=kind, shape=shape, names=names)
    with pytest.raises(ValueError, match=f"{message}, or change the strategy"):
        resolve_strategy(strategy, world)
    assert resolve_strategy(strategy, strategy.world_size) == strategy


def test_ranks_that_do_not_train_together_may_share_a_strategy_for_one_rank() -> None:
    strategy = Strategy(kind="none", shape=(1,), names=("dp",))
    assert resolve_strategy(strategy, 8).world_size == 1


@pytest.mark.parametrize(
    "text", ["fsdp", "[]", "{}", '{"kind": "ddp", "mesh": 3}', '{"kind": "dpp", "mesh": {"shape": [2], "names": ["dp"]}}']
)
def test_an_invalid_strategy_variable_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=f"DISTFLOW_STRATEGY is {re.escape(repr(text))}, not a valid strategy such as"):
        current_strategy({"DISTFLOW_STRATEGY": text})


@pytest.mark.parametrize(
    ("shape", "names", "shares"),
    [
        ((4,), ("dp",), [(0, 4), (1, 4), (2, 4), (3, 4)]),
        ((4,), ("tp",), [(0, 1)] * 4),
        ((2, 2), ("fsdp", "tp"), [(0, 2), (0, 2), (1, 2), (1, 2)]),
        ((2, 2), ("pp", "dp"), [(0, 2), (1, 2), (0, 2), (1, 2)]),
        ((2, 2), ("pp", "tp"), [(0, 1)] * 4),
        ((2, 2), ("fsdp", "cp"), [(0, 2), (0, 2), (1, 2), (1, 2)]),
        ((2, 2), ("dp", "fsdp"), [(0, 4), (1, 4), (2, 4), (3, 4)]),
    ],
)
def test_ranks_that_share_one_copy_of_the_model_get_the_same_data(
    shape: tuple[int, ...], names: tuple[str, ...], shares: list[tuple[int, int]]
) -> None:
    strategy = Strategy(kind="x", shape=shape, names=names)
    assert [strategy.data_shard(rank) for rank in range(4)] == shares
    assert data_shard({"RANK": "3", "WORLD_SIZE": "4"}) == (3, 4)


@pytest.mark.parametrize(
    ("kind", "options"),
    [("ddp", {}), ("fsdp", {}), ("tp", {}), ("hybrid", {"tp_size": 2}), ("pipeline", {}), ("pipeline", {"stages": 2}),
     ("pipeline", {"stages": 2, "tp_size": 2}), ("pipeline", {"shard_size": 2}), ("hybrid", {"tp_size": 2, "shard_size": 1}),
     ("fsdp", {"sharding_strategy": "HYBRID_SHARD", "shard_size": 2}), ("none", {})],
)  # fmt: skip
def test_the_spec_and_the_program_make_the_same_mesh(kind: str, options: dict[str, object]) -> None:
    strategy, problems = parse_strategy({"kind": kind, **options}, (4,))
    made = make_strategy(kind, 4, options)
    assert strategy is not None, problems
    assert (made.shape, made.names, made.options) == (strategy.shape, strategy.names, strategy.options)


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("hybrid", {}, r"the size of `tp` is not defined: add tp_size, or mesh_shape: \[\[…, …\], \[fsdp, tp\]\]"),
        ("hybrid", {"tp_size": 3}, "`tp_size` is 3, which does not divide 4 ranks"),
        ("hybrid", {"tp_size": 2, "cp_size": 3}, "which does not divide the remaining 2 ranks: use one of 1, 2"),
        ("zero", {}, "unknown strategy 'zero'"),
    ],
)
def test_the_error_explains_why_a_strategy_cannot_be_made(kind: str, options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_strategy(kind, 4, options)


def test_the_share_of_the_data_is_known_without_torch() -> None:
    code = "import sys, distflow.train.strategies.description as d; d.data_shard(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
