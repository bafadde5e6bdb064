"""Plans in one process: their options, their share of the data, and the deprecated functions that they replace."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from distflow import train
from distflow.train.parallel import ParallelPlan, parallelize
from distflow.train.strategies.description import make_strategy, reset_current_strategy, resolve_strategy
from distflow.train.strategies.options import MESH_SIZES, OPTIONS, STRATEGIES

pytestmark = pytest.mark.torch


def test_the_classes_have_the_options_of_the_spec() -> None:
    names = {one.name for options in STRATEGIES.values() for one in dataclasses.fields(options)}
    assert names == {*OPTIONS, *MESH_SIZES}


@pytest.mark.parametrize(
    ("given", "kind", "options"),
    [
        (train.DDP(bucket_cap_mb=5, timeout_s=60), "ddp", {"bucket_cap_mb": 5, "timeout_s": 60}),
        (train.FSDP(cpu_offload=True, reduce_dtype="bf16"), "fsdp", {"cpu_offload": True, "reduce_dtype": "bf16"}),
        (train.HybridParallel(tp_size=2, mixed_precision=True), "hybrid", {"tp_size": 2, "mixed_precision": "bf16"}),
        (train.PipelineParallel(stages=2), "pipeline", {"stages": 2}),
        (train.TensorParallel(), "tp", {}),
    ],
)  # fmt: skip
def test_a_class_makes_the_same_strategy_as_the_spec(
    given: train.StrategyOptions, kind: str, options: dict[str, object]
) -> None:
    assert resolve_strategy(given, 4) == make_strategy(kind, 4, options)


def test_a_misspelled_option_is_refused() -> None:
    with pytest.raises(TypeError, match="bucket_cap"):
        train.DDP(bucket_cap=5)  # type: ignore[call-arg]
    with pytest.raises(ValueError, match="mixed_precision is 'bf17'"):
        resolve_strategy(train.FSDP(mixed_precision="bf17"), 2)  # type: ignore[arg-type]


def test_a_plan_uses_the_share_of_data_and_the_batch_size_of_its_own_strategy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "2")
    plan = ParallelPlan(nn.Linear(1, 1), make_strategy("hybrid", 4, {"tp_size": 2, "global_batch_size": 8}))
    assert plan.data_shard == (1, 2)
    loader = plan.loader(range(4), plan.batch_sizes().per_rank, shuffle=False)
    assert [batch.tolist() for batch in loader] == [[1, 3]]


INPUTS, TARGETS = torch.ones(4, 2), torch.zeros(4, 1)
MSE = nn.functional.mse_loss
DEPRECATED: dict[str, tuple[Callable[[nn.Module], Any], Callable[[ParallelPlan], Any]]] = {
    "backward": (lambda one: train.backward(one, INPUTS, TARGETS, MSE), lambda one: one.forward_backward(INPUTS, TARGETS, MSE)),
    "evaluate": (lambda one: train.evaluate(one, INPUTS, TARGETS, MSE), lambda one: one.evaluate(INPUTS, TARGETS, MSE)),
    "clip_gradients": (lambda one: train.clip_gradients(one, 1.0), lambda one: one.clip_gradients(1.0)),
    "full_state_dict": (lambda one: list(train.full_state_dict(one)), lambda one: list(one.full_state_dict())),
    "data_shard": (lambda _: train.data_shard(), lambda one: one.data_shard),
    "current_strategy": (lambda _: train.current_strategy(), lambda one: one.strategy),
}


@pytest.mark.parametrize("name", DEPRECATED)
def test_a_deprecated_function_does_the_same_and_warns(name: str) -> None:
    torch.manual_seed(0)
    try:
        plan = parallelize(nn.Linear(2, 1), train.DDP(gradient_accumulation_steps=2))
        old, new = DEPRECATED[name]
        with pytest.warns(DeprecationWarning, match=rf"distflow.train.{name}\(\) is deprecated: use plan") as caught:
            result = old(plan.model)
        assert caught[0].filename == __file__
        assert result == new(plan)
    finally:
        reset_current_strategy()


def test_the_deprecated_parallelize_takes_options_by_name() -> None:
    try:
        with pytest.warns(DeprecationWarning, match=r"use plan = world.parallelize\(model, strategy\)"):
            model = train.parallelize(nn.Linear(2, 1), "ddp", gradient_accumulation_steps=2)
        assert isinstance(model, nn.Linear)
        with pytest.warns(DeprecationWarning, match="parallelize"), pytest.raises(ValueError, match="no option 'bucket_cap'"):
            train.parallelize(nn.Linear(2, 1), bucket_cap=1)
    finally:
        reset_current_strategy()


def test_a_strategy_for_several_ranks_is_refused_before_the_ranks_are_connected() -> None:
    with pytest.raises(ValueError, match="the ranks are not connected yet"):
        parallelize(nn.Linear(2, 1), make_strategy("ddp", 2))
