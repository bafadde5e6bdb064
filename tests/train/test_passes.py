"""The passes of a training step in one process: warnings about options without effect, and batches of several tensors."""

from __future__ import annotations

import warnings
from collections import UserDict
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from distflow.train import finish
from distflow.train.parallel import ParallelPlan, parallelize
from distflow.train.strategies.description import data_shard, make_strategy, reset_current_strategy, set_current_strategy
from distflow.train.strategies.sequences import part_of_sequences

pytestmark = [pytest.mark.torch, pytest.mark.timeout(300)]


@pytest.fixture(autouse=True)
def _world(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    finish()


def make_plan() -> ParallelPlan:
    return ParallelPlan(DistributedDataParallel(nn.Linear(2, 1)), make_strategy("ddp", 2, {"sync_gradients_every": 4}))


def step(plan: ParallelPlan) -> None:
    plan.forward_backward(torch.ones(2, 2), torch.ones(2, 1), nn.functional.mse_loss)


def test_a_strategy_with_local_sgd_warns_once_if_the_program_does_not_use_it() -> None:
    plan = make_plan()
    with pytest.warns(UserWarning, match=r"sync_gradients_every: 4, but .* in every step: .*plan.local_sgd\(optimizer\)"):
        step(plan)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(plan)


def test_a_strategy_with_local_sgd_does_not_warn_if_the_program_uses_it() -> None:
    plan = make_plan()
    plan.local_sgd(torch.optim.SGD(plan.model.parameters(), lr=0.1))
    step(plan)


def test_a_plan_does_not_use_the_batch_size_of_another_one() -> None:
    set_current_strategy(make_strategy("ddp", 1, {"global_batch_size": 8}), rank=0)
    with pytest.raises(ValueError, match="the strategy of the plan sets no batch size"):
        ParallelPlan(nn.Linear(2, 1), make_strategy("ddp", 1)).batch_sizes()


def test_a_pipeline_refuses_a_batch_without_samples() -> None:
    plan = parallelize(nn.Sequential(nn.Linear(2, 1)), "pipeline", loss=nn.functional.mse_loss)
    with pytest.raises(ValueError, match="the batch has no samples"):
        plan.forward_backward(torch.ones(0, 2), torch.ones(0, 1), nn.functional.mse_loss)


def test_a_batch_with_fewer_samples_than_micro_batches_is_refused_with_the_setting_to_change() -> None:
    plan = ParallelPlan(nn.Linear(2, 1), make_strategy("none", 1, {"gradient_accumulation_steps": 8}))
    batch = torch.ones(4, 2), torch.ones(4, 1), nn.functional.mse_loss
    with pytest.raises(ValueError, match="set the strategy's `gradient_accumulation_steps` to a number from 1 to 4"):
        plan.forward_backward(*batch)
    with pytest.raises(ValueError, match="set `micro_batches` to a number from 1 to 4"):
        plan.forward_backward(*batch, micro_batches=0)


def test_context_parallelism_refuses_tensors_without_a_time_dimension() -> None:
    parts = part_of_sequences(init_device_mesh("cpu", (1,)), torch.ones(4), None)
    with pytest.raises(ValueError, match=r"must have the shape \(samples, time, …\).*found \(4,\)"), parts:
        pass


def test_a_strategy_replaces_an_earlier_single_process_one_without_a_warning() -> None:
    reset_current_strategy()
    set_current_strategy(make_strategy("none", 1), rank=0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        set_current_strategy(make_strategy("ddp", 2), rank=1)
    assert data_shard() == (1, 2)


class TwoInputs(nn.Module):
    """A model that takes the keys of a batch as argument names, like models of Hugging Face."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(2, 1)

    def forward(self, ids: torch.Tensor, mask: torch.Tensor, scale: float = 1.0) -> dict[str, torch.Tensor]:
        return {"out": self.line(ids * mask) * scale}


def loss_of(outputs: dict[str, torch.Tensor], targets: dict[str, torch.Tensor]) -> torch.Tensor:
    return nn.functional.mse_loss(outputs["out"], targets["labels"])


NONE = make_strategy("none", 1)
IDS, MASK = torch.arange(12.0).reshape(6, 2) / 12, torch.tensor([[1.0, 0.0], [1.0, 1.0]] * 3)


@pytest.mark.parametrize("kind", ["mapping", "user mapping", "tuple", "list"])
def test_batches_of_several_tensors_are_divided_into_micro_batches(kind: str) -> None:
    reset_current_strategy()
    targets = {"labels": torch.ones(6, 1)}
    inputs = {
        "mapping": {"ids": IDS, "mask": MASK, "scale": 0.5}, "user mapping": UserDict({"ids": IDS, "mask": MASK, "scale": 0.5}),
        "tuple": (IDS, MASK, 0.5), "list": [IDS, MASK, 0.5],
    }[kind]  # fmt: skip
    found = []
    for micro_batches in (1, 4):
        torch.manual_seed(0)
        model = DistributedDataParallel(TwoInputs())
        plan = ParallelPlan(model, NONE)
        loss = plan.forward_backward(inputs, targets, loss_of, micro_batches=micro_batches)
        gradient = model.module.line.weight.grad
        assert gradient is not None
        found.append((loss.item(), gradient.flatten().tolist(), plan.evaluate(inputs, targets, loss_of).item()))
    assert found[0][1] == pytest.approx(found[1][1])
    assert found[0][0] == pytest.approx(found[1][0])
    assert found[0][2] == found[1][2] == pytest.approx(found[0][0])


def test_targets_can_be_omitted_and_tensors_of_another_length_are_refused() -> None:
    plan = ParallelPlan(TwoInputs(), NONE)

    def mean_output(outputs: dict[str, torch.Tensor], _: None) -> torch.Tensor:
        return outputs["out"].mean()

    assert plan.forward_backward({"ids": IDS, "mask": MASK}, None, mean_output, micro_batches=2).isfinite()
    with pytest.raises(ValueError, match=r"`inputs\.mask` has length 3, but the first tensor of the inputs has length 6"):
        plan.forward_backward({"ids": IDS, "mask": MASK[:3]}, None, mean_output, micro_batches=2)
    with pytest.raises(ValueError, match="the batch has no tensor with at least one dimension"):
        plan.evaluate({"ids": 1}, None, mean_output)
