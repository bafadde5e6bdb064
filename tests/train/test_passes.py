"""The passes of a step in one process: what is said of options that the program leaves without effect."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from distflow.train import backward, data_shard, finish, local_sgd
from distflow.train.strategies.description import choose, forget, make_strategy

pytestmark = [pytest.mark.torch, pytest.mark.timeout(300)]


@pytest.fixture(autouse=True)
def _world(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    choose(make_strategy("ddp", 2, {"sync_gradients_every": 4}), rank=0)
    yield
    finish()


def step(model: nn.Module) -> None:
    backward(model, torch.ones(2, 2), torch.ones(2, 1), nn.functional.mse_loss)


def test_averages_that_the_program_does_not_make_are_missed_once() -> None:
    model = DistributedDataParallel(nn.Linear(2, 1))
    with pytest.warns(UserWarning, match=r"sync_gradients_every: 4, but .* in every step: .*local_sgd\(model, optimizer\)"):
        step(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(model)


def test_averages_that_the_program_makes_are_not_missed() -> None:
    model = DistributedDataParallel(nn.Linear(2, 1))
    local_sgd(model, torch.optim.SGD(model.parameters(), lr=0.1))
    step(model)


def test_a_teacher_that_was_made_first_changes_nothing() -> None:
    forget()
    choose(make_strategy("none", 1), rank=0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        choose(make_strategy("ddp", 2), rank=1)
    assert data_shard() == (1, 2)
