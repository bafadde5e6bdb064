"""The analysis of models in one process: their repeated layers, matrices that can be split, and parts of about equal size."""

from __future__ import annotations

import subprocess
import sys
from itertools import combinations, pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from distflow.samples.gpt import Block, Gpt
from distflow.train.parallel import parallelize
from distflow.train.strategies.build import large_modules, repeated_layers
from distflow.train.strategies.stages import balanced_parts
from distflow.train.strategies.tensors import derive_plan
from distflow.train.strategies.weights import weight_names

pytestmark = pytest.mark.torch


class Holder(nn.Module):
    """A module with children of these names."""

    def __init__(self, **children: nn.Module) -> None:
        super().__init__()
        for name, child in children.items():
            self.add_module(name, child)


def linear() -> nn.Linear:
    return nn.Linear(4, 4)


def test_repeated_layers_are_found_without_their_class() -> None:
    model = Holder(embedding=nn.Embedding(4, 4), layers=nn.ModuleList([Block(8, 2) for _ in range(3)]), head=linear())
    assert repeated_layers(model) == list(model.get_submodule("layers").children())
    assert repeated_layers(nn.Sequential(linear(), linear())) == []


def test_layers_are_found_by_class() -> None:
    assert [type(layer).__name__ for layer in repeated_layers(Gpt(layers=2), ["Mlp"])] == ["Mlp", "Mlp"]


def test_a_model_on_the_meta_device_gets_the_values_of_its_constructors() -> None:
    def made() -> nn.Module:
        return nn.Sequential(nn.Embedding(8, 4, padding_idx=0), nn.Linear(4, 4), nn.BatchNorm1d(4))

    torch.manual_seed(0)
    wanted = made().state_dict()
    with torch.device("meta"):
        model = made()
    torch.manual_seed(0)
    filled = parallelize(model, "none").model.state_dict()
    assert set(filled) == set(wanted)
    assert all(torch.equal(one, wanted[name]) for name, one in filled.items())


def test_modules_are_wrapped_if_their_unwrapped_parameters_are_large() -> None:
    inner = nn.Linear(10, 10, bias=False)
    outer = Holder(inner=inner, small=nn.Linear(5, 10, bias=False))
    model = Holder(outer=outer, head=nn.Linear(2, 2))
    assert large_modules(model, 100) == [inner]
    assert large_modules(model, 50) == [inner, outer.get_submodule("small")]
    assert large_modules(model, 150) == [outer]


@pytest.mark.parametrize(
    ("children", "plan"),
    [
        (("q_proj", "k_proj", "v_proj", "o_proj"), ["colwise", "colwise", "colwise", "rowwise"]),
        (("gate_proj", "up_proj", "down_proj"), ["colwise", "colwise", "rowwise"]),
        (("wq", "wk", "wv", "wo"), ["colwise", "colwise", "colwise", "rowwise"]),
        (("fc1", "fc2"), ["colwise", "rowwise"]),
        (("c_attn", "c_proj"), []),  # query, key and value in one matrix
        (("q_proj", "kv_proj", "o_proj"), []),  # of two kinds: ranks would have all keys for a part of the queries
        (("first", "second"), []),
        (("up_proj",), []),  # without its partner
    ],
)
def test_matrices_are_split_in_pairs(children: tuple[str, ...], plan: list[str]) -> None:
    model = Holder(layer=Holder(**{name: linear() for name in children}))
    assert derive_plan(model) == {f"layer.{name}": style for name, style in zip(children, plan, strict=False)}


@given(st.lists(st.integers(0, 50), min_size=1, max_size=8), st.integers(1, 8))
def test_parts_are_as_equal_as_possible(weights: list[int], count: int) -> None:
    if count > len(weights):
        with pytest.raises(ValueError, match="top-level layers"):
            balanced_parts(weights, count)
        return
    parts = balanced_parts(weights, count)
    assert [place for part in parts for place in part] == list(range(len(weights)))
    assert len(parts) == count
    assert all(parts)

    def heaviest(cuts: tuple[int, ...]) -> int:
        edges = [0, *cuts, len(weights)]
        return max(sum(weights[first:last]) for first, last in pairwise(edges))

    best = min(heaviest(cuts) for cuts in combinations(range(1, len(weights)), count - 1))
    assert max(sum(weights[place] for place in part) for part in parts) == best


def test_loading_weights_without_safetensors_names_the_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(RuntimeError, match=r"cannot read the weights in .*: install the package safetensors"):
        weight_names(tmp_path, nn.Linear(1, 1))


def test_training_replicas_does_not_import_the_sharding_modules_of_torch() -> None:
    code = "import sys; from distflow.train import Loader, backward, init, parallelize, report; print(*sys.modules)"
    loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    ).stdout.split()
    assert "torch.nn.parallel.distributed" in loaded
    assert not {"torch.distributed.fsdp", "torch.distributed.pipelining", "torch.distributed.tensor"} & set(loaded)
