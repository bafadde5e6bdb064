"""Checks of context parallelism for ``test_strategies``: torch's ring attention with an additional kernel for CPUs.

torch 2.13 registers only GPU kernels for its ring attention. ``add_cpu_kernel`` registers the CPU kernel, so that all code but
the kernel is the same as on GPUs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.experimental import _context_parallel
from torch.nn import functional

from distflow.samples.gpt import Block
from distflow.train.strategies.description import make_strategy
from train.ranks import STEPS, Results, make_plan, optimizer_of, whole_parameters

VOCABULARY, HIDDEN, TIME, BATCH = 32, 16, 16, 4
aten = torch.ops.aten


class PositionalModel(nn.Module):
    """A model that takes its positions as an argument."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.token, self.position = nn.Embedding(VOCABULARY, HIDDEN), nn.Embedding(TIME, HIDDEN)
        self.blocks = nn.ModuleList(Block(HIDDEN, 4) for _ in range(2))
        self.head = nn.Linear(HIDDEN, VOCABULARY)

    def forward(self, tokens: torch.Tensor, position_ids: torch.Tensor | None = None) -> torch.Tensor:
        positions = torch.arange(tokens.shape[1]) if position_ids is None else position_ids
        x = self.token(tokens) + self.position(positions)
        for block in self.blocks:
            x = block(x)
        return torch.as_tensor(self.head(x))


def loss_of(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(outputs.flatten(0, 1), targets.flatten())


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(VOCABULARY, (BATCH, TIME + 1), generator=torch.Generator().manual_seed(step))
    return tokens[:, :-1], tokens[:, 1:]


def add_cpu_kernel() -> None:
    kernels: dict[Any, Any] = _context_parallel._attention.custom_ops
    kernels[aten._scaled_dot_product_flash_attention_for_cpu.default] = _forward
    kernels[aten._scaled_dot_product_flash_attention_for_cpu_backward.default] = _backward


def _local(values: tuple[Any, ...]) -> list[Any]:
    return [value.to_local() if isinstance(value, DTensor) else value for value in values]


def _wrapped(mesh: Any, values: tuple[torch.Tensor, ...]) -> tuple[DTensor, ...]:
    return tuple(DTensor.from_local(value, mesh, [Shard(2)], run_check=False) for value in values)


def _forward(_: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[DTensor, ...]:
    mesh, (query, key, value, dropout, is_causal) = args[0].device_mesh, _local(args)
    assert kwargs.get("attn_mask") is None
    kernel = aten._scaled_dot_product_flash_attention_for_cpu.default
    found = _context_parallel._attention._templated_ring_attention(
        mesh.get_group(), 2, kernel, query, key, value, is_causal, dropout_p=dropout, scale=kwargs.get("scale")
    )
    return _wrapped(mesh, found)


def _backward(_: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[DTensor, ...]:
    mesh, (gradient, query, key, value, out, logsumexp, dropout, is_causal) = args[0].device_mesh, _local(args)

    def kernel(grad_out: Any, query: Any, key: Any, value: Any, out: Any, logsumexp: Any, **more: Any) -> Any:
        op = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
        causal = more.pop("is_causal")
        return op(grad_out, query, key, value, out, logsumexp, more.pop("dropout_p"), causal, **more)

    ring_backward: Any = _context_parallel._attention._templated_ring_attention_backward
    found = ring_backward(
        mesh.get_group(), 2, kernel, gradient, "grad_out", query, key, value, out, logsumexp, is_causal,
        dropout_p=dropout, scale=kwargs.get("scale"),
    )  # fmt: skip
    return _wrapped(mesh, found[:3])


def training_check(**options: Any) -> Callable[[], Results]:
    """Return a check that trains on parts of sequences, and compares parameters and losses with one process."""

    def check() -> Results:
        world = dist.get_world_size()
        refused = ""
        try:
            make_plan(PositionalModel(), make_strategy("hybrid", world, options))
        except ValueError as error:
            refused = str(error)
        add_cpu_kernel()
        try:
            return {"refused": refused, **_compare(make_strategy("hybrid", world, options))}
        finally:
            for kernel in ("", "_backward"):
                name = f"_scaled_dot_product_flash_attention_for_cpu{kernel}"
                _context_parallel._attention.custom_ops.pop(getattr(aten, name).default)

    return check


def _compare(strategy: Any) -> Results:
    plan, alone = make_plan(PositionalModel(), strategy), PositionalModel()
    optimizers = optimizer_of(plan.model), optimizer_of(alone)
    index, count = plan.data_shard
    worst = 0.0
    for step in range(STEPS):
        inputs, targets = batch(step)
        mine = [one.tensor_split(count)[index] for one in (inputs, targets)]
        kept = mine[0].clone()
        loss = plan.forward_backward(mine[0], mine[1], loss_of, micro_batches=1 + step % 2)
        assert torch.equal(mine[0], kept)
        wanted = loss_of(alone(inputs), targets)
        wanted.backward()
        dist.all_reduce(loss)
        worst = max(worst, abs(loss.item() / dist.get_world_size() - wanted.item()))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    inputs, targets = batch(9)
    mine = [one.tensor_split(count)[index] for one in (inputs, targets)]
    evaluated = plan.evaluate({"tokens": mine[0]}, mine[1], loss_of)
    worst = max(worst, abs(evaluated.item() - loss_of(alone(inputs), targets).item()))
    target, got = dict(alone.named_parameters()), whole_parameters(plan.model)
    errors = []
    for call in (lambda: plan.model(mine[0]), lambda: plan.evaluate(mine[0][:, :6], mine[1], loss_of)):
        try:
            call()
        except (TypeError, ValueError) as error:
            errors.append(str(error))
    farthest = torch.tensor(max((got[name] - target[name]).abs().max().item() for name in got))
    dist.all_reduce(farthest, dist.ReduceOp.MAX)
    return {"difference": farthest.item(), "losses": worst, "errors": errors}


def sequence_checks(world: int) -> dict[str, Callable[[], Results]]:
    """Return the checks for this number of ranks."""
    if world == 2:
        return {"sequences": training_check(tp_size=1, cp_size=2)}
    return {"sequences × shards": training_check(tp_size=1, cp_size=2), "sequences × tp": training_check(tp_size=2, cp_size=2)}
