"""Helpers for the ranks of ``test_strategies``: a small model, its batches, a single-process reference, and the runner."""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from distflow.samples.gpt import Gpt, loss_of
from distflow.train.parallel import ParallelPlan, parallelize
from distflow.train.strategies.description import Strategy, make_strategy
from distflow.train.strategies.stages import Pipeline

STEPS, BATCH, TIME = 2, 8, 12
Results = dict[str, Any]


def new_model(seed: int = 0, blocks: int = 2) -> Gpt:
    """Return a model with ``blocks + 2`` layers, which a pipeline can cut into as many stages."""
    torch.manual_seed(seed)
    return Gpt(layers=blocks, hidden=32, heads=4, context=TIME)


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(step)
    tokens = torch.randint(256, (BATCH, TIME + 1), generator=draw)
    return tokens[:, :-1], tokens[:, 1:]


class SGDOfParts(torch.optim.SGD):
    """SGD that changes this rank's parts of the parameters, without operations on DTensors."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                gradient = parameter.grad
                if isinstance(parameter, DTensor):
                    assert parameter.placements == gradient.placements
                    parameter, gradient = parameter.to_local(), gradient.to_local()  # noqa: PLW2901
                parameter.sub_(gradient, alpha=group["lr"])


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    # On a mesh with three axes, torch takes 0.1 s for each operation on DTensors of one shape. Plain SGD has the fewest
    # operations. With 4 ranks, "replicas × tp" has such a mesh and torch's SGD.
    kind = SGDOfParts if dist.get_world_size() == 8 else torch.optim.SGD
    return kind(model.parameters(), lr=0.2)


def reference(model: nn.Module | None = None) -> dict[str, torch.Tensor]:
    """Return the parameters after single-process training on the whole batch, by default those of a new model."""
    model = model or new_model()
    optimizer = optimizer_of(model)
    for step in range(STEPS):
        inputs, targets = batch(step)
        loss_of(model(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def make_plan(
    model: nn.Module, strategy: Strategy | str, loss: Any = None, example: Any = None, **options: object
) -> ParallelPlan:
    """Return a plan for a strategy with these options of a spec."""
    if isinstance(strategy, str):
        strategy = make_strategy(strategy, dist.get_world_size(), options)
    elif options:
        strategy = strategy.having(options)
    return parallelize(model, strategy, loss=loss, example=example)


def in_float64(check: Callable[[], Results]) -> Callable[[], Results]:
    """Return a check in which new tensors have float64, where rounding is negligible."""

    def run() -> Results:
        torch.set_default_dtype(torch.float64)
        try:
            return check()
        finally:
            torch.set_default_dtype(torch.float32)

    return run


def whole_parameters(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the whole parameters of this rank's model or stages."""
    inner = model.part if isinstance(model, Pipeline) else model
    return {
        name.removeprefix("module."): (one.full_tensor() if isinstance(one, DTensor) else one).detach()
        for name, one in inner.named_parameters()
    }


def run_checks(checks: Mapping[int, Mapping[str, Callable[[], Results]]]) -> None:
    """Run the checks for this world size in forked ranks, which share the import of torch. Exit with 0 if all ranks do."""
    ranks = [_fork(rank, checks) for rank in range(int(os.environ["WORLD_SIZE"]))]
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in ranks]
    print(f"exit codes of the ranks: {codes}", flush=True)
    sys.exit(0 if set(codes) == {0} else 1)


def _fork(rank: int, checks: Mapping[int, Mapping[str, Callable[[], Results]]]) -> int:
    pid = os.fork()
    if pid == 0:
        os.environ["RANK"] = os.environ["LOCAL_RANK"] = str(rank)
        log = os.open(f"rank{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        for stream in (1, 2):
            os.dup2(log, stream)
        _check(rank, checks)
        sys.exit()
    return pid


def _check(rank: int, checks: Mapping[int, Mapping[str, Callable[[], Results]]]) -> None:
    """Run the checks on one rank. After a failed check it exits, because the other ranks wait for it."""
    world = int(os.environ["WORLD_SIZE"])
    dist.init_process_group(
        "gloo",
        init_method=f"file://{os.environ['RENDEZVOUS_FILE']}",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=60),
    )
    results: Results = {}
    for name, check in checks[world].items():
        try:
            results[name] = check()
        except Exception:  # noqa: BLE001  the other ranks wait for this one in the next check
            traceback.print_exc()
            print(f"rank {rank}: {name!r} failed", flush=True)
            os._exit(1)
    if rank == 0:
        Path(os.environ["RESULTS"]).write_text(json.dumps(results))
    dist.destroy_process_group()
