"""The checks that the ranks of ``test_strategies`` run: most train a model and compare it with single-process training."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from distflow.samples.gpt import Gpt, loss_of
from distflow.train import all_reduce_mean
from distflow.train.communication.gradients import compress_gradients
from distflow.train.parallel import ParallelPlan
from distflow.train.strategies.build import make_mesh
from distflow.train.strategies.description import Strategy, make_strategy
from distflow.train.strategies.stages import Pipeline
from train.choice_checks import calls_without_plan
from train.evaluation_checks import evaluations
from train.meta_checks import first_values
from train.ranks import STEPS, Found, answer, batch, new_model, optimizer_of, prepared, reference, whole
from train.sent import Sent
from train.sequence_checks import sequences


def trained(strategy: Strategy, **more: Any) -> tuple[ParallelPlan, float]:
    # The other ranks have to get rank 0's parameters.
    plan = prepared(new_model(seed=dist.get_rank()), strategy, loss=loss_of, **more)
    optimizer = optimizer_of(plan.model)
    index, count = plan.data_shard
    loss = torch.zeros(())
    for step in range(STEPS):
        inputs, targets = (one.tensor_split(count)[index] for one in batch(step))
        # Alternate between one and two passes.
        loss = plan.forward_backward(inputs, targets, loss_of, micro_batches=1 + step % 2)
        optimizer.step()
        optimizer.zero_grad()
    return plan, loss.item()


def compared(strategy: Strategy, **more: Any) -> Found:
    plan, loss = trained(strategy, **more)
    model = plan.model
    wanted, start, got = reference(), dict(new_model().named_parameters()), whole(model)
    inner = model.part if isinstance(model, Pipeline) else model
    mine = sum((one.to_local() if isinstance(one, DTensor) else one).numel() for one in inner.parameters())
    worst = torch.tensor(max((got[name] - wanted[name]).abs().max().item() for name in got))
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    names: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(names, (sorted(got), mine, loss))
    return {
        "difference": worst.item(),
        "moved": max((start[name] - one).abs().max().item() for name, one in wanted.items()),
        "complete": {name for one, _, _ in names for name in one} == set(wanted),
        "shares": [share / sum(one.numel() for one in wanted.values()) for _, share, _ in names],
        "losses": [one for _, _, one in names],
        "children": [sorted({name.partition(".")[0] for name in held}) for held, _, _ in names],
    }


def made(kind: str, **options: Any) -> Callable[[], Found]:
    """Return a check that compares in float64, where rounding is negligible; with mixed precision, in float32."""

    def check() -> Found:
        if "mixed_precision" not in options:
            torch.set_default_dtype(torch.float64)
        try:
            return compared(make_strategy(kind, dist.get_world_size(), options))
        finally:
            torch.set_default_dtype(torch.float32)

    return check


class Shifted(nn.Module):
    """A model with two inputs, which pipelines trace because it is not an ``nn.Sequential``."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(self.second(torch.tanh(self.first(x + shift))))


def traced_pipeline() -> Found:
    x, shift, y = torch.ones(4, 8), torch.arange(32.0).reshape(4, 8) / 32, torch.zeros(4, 8)
    options = {"split_points": ["second"], "micro_batches": 2}
    plan = prepared(Shifted(), "pipeline", loss=nn.functional.mse_loss, example=(x[:2], shift[:2]), **options)
    model = plan.model
    assert isinstance(model, Pipeline)
    loss = plan.forward_backward((x, shift), y, nn.functional.mse_loss)
    alone = Shifted()
    nn.functional.mse_loss(alone(x, shift), y).backward()
    wanted = dict(alone.named_parameters())
    gradients = {name: one.grad for name, one in model.part.named_parameters() if one.grad is not None}
    return {
        "difference": max((one - torch.as_tensor(wanted[name].grad)).abs().max().item() for name, one in gradients.items()),
        "gradients": len(gradients),
        "loss": abs(loss.item() - nn.functional.mse_loss(alone(x, shift), y).item()),
        "evaluated": abs(loss.item() - plan.evaluate((x, shift), y, nn.functional.mse_loss).item()),
        "by_name": abs(loss.item() - plan.evaluate({"x": x, "shift": shift}, y, nn.functional.mse_loss).item()),
    }  # fmt: skip


def pipeline_in_bfloat16() -> Found:
    """Return the losses of all ranks for a model whose dtype only the last stage knows from its loss."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).to(torch.bfloat16)
    plan, x = prepared(model, "pipeline", loss=nn.functional.mse_loss), torch.ones(2, 4, dtype=torch.bfloat16)
    losses = plan.forward_backward(x, x, nn.functional.mse_loss), plan.evaluate(x, x, nn.functional.mse_loss)
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, [(one.item(), str(one.dtype)) for one in losses])
    return {"losses": found}


def frozen_replicas() -> Found:
    """Return the difference between the ranks' parameters in a model without trainable ones, which DDP does not wrap."""
    model = new_model(seed=dist.get_rank()).requires_grad_(False)
    return {"before": rank_difference(model), "after": rank_difference(prepared(model, "ddp").model)}


def mesh_groups() -> Found:
    mesh = make_mesh(make_strategy("hybrid", 4, {"tp_size": 2}))
    groups = {axis: sorted(dist.get_process_group_ranks(mesh[axis].get_group())) for axis in ("fsdp", "tp")}
    everyone: list[Any] = [None] * 4
    dist.all_gather_object(everyone, groups)
    return {axis: sorted({tuple(one[axis]) for one in everyone}) for axis in ("fsdp", "tp")}


def sequence_parts() -> Found:
    """Return the lengths of a sequence of 12 in norms, and the errors for invalid inputs."""
    model, lengths = prepared(new_model(), "tp", sequence_parallel=True).model, []
    for norm in (model.get_submodule("block0.mlp_norm"), model.get_submodule("block1.attention_norm")):
        norm.register_forward_pre_hook(lambda _, inputs: lengths.append(inputs[0].to_local().shape[1]))
    whole_length = model(batch(0)[0]).shape[1]
    errors = []
    for call in (lambda: model(batch(0)[0][:, :7]), lambda: model.get_submodule("block0")(x=torch.zeros(1, 12, 32))):
        try:
            call()
        except ValueError as error:
            errors.append(str(error))
    return {"parts": lengths[:2], "whole": whole_length, "errors": errors}


# -- communication ----------------------------------------------------------------------------------------------------


def rank_difference(model: nn.Module) -> float:
    """Return the maximum difference between the parameters of ranks."""
    flat = nn.utils.parameters_to_vector(model.parameters()).detach()
    others = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
    dist.all_gather(others, flat)
    return max((one - flat).abs().max().item() for one in others)


def compression() -> Found:
    found: Found = {}
    for how in ("none", "fp16", "bf16", "powersgd"):
        model = prepared(new_model(), "ddp", compression=how).model
        optimizer = optimizer_of(model)
        inputs, targets = (one.tensor_split(2)[dist.get_rank()] for one in batch(0))
        loss_of(model(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
        # DDP has its final buckets only in the second pass.
        with Sent() as monitor:
            loss_of(model(inputs), targets).backward()
        optimizer.step()
        sent = monitor.bytes["all_reduce"]
        found[how] = {
            "ranks": rank_difference(model), "bytes": sent, "parameters": nn.utils.parameters_to_vector(model.parameters())
        }  # fmt: skip
    plain = found["none"]["parameters"]
    for one in found.values():
        one["difference"] = (one.pop("parameters") - plain).abs().max().item()
    return found


def powersgd_sends_less() -> Found:
    model = DistributedDataParallel(new_model())
    compress_gradients(model, "powersgd", rank=1, start_iteration=2)
    sent = []
    for step in range(5):
        inputs, targets = (one.tensor_split(2)[dist.get_rank()] for one in batch(step))
        with Sent() as monitor:
            loss_of(model(inputs), targets).backward()
        sent.append(monitor.bytes["all_reduce"])
    return {"sent": sent}


def buckets() -> Found:
    found = {}
    for size in (1, 5, 25):
        torch.manual_seed(0)
        # Six layers of 1 MiB each.
        model = prepared(nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(6))), "ddp", bucket_cap_mb=size).model
        x = torch.ones(2, 512)
        model(x).sum().backward()
        with Sent() as monitor:
            model(x).sum().backward()
        found[str(size)] = monitor.calls["all_reduce"]
    return found


def accumulation() -> Found:
    found: Found = {}
    for kind in ("ddp", "fsdp"):
        plan = prepared(new_model(), kind)
        model = plan.model
        optimizer = optimizer_of(model)
        index = dist.get_rank()
        counts = []
        for step in range(STEPS):
            inputs, targets = (one.tensor_split(2)[index] for one in batch(step))
            passes = []
            with Sent() as monitor:
                for some, wanted in zip(inputs.split(1), targets.split(1), strict=True):
                    with plan.accumulate(every=4) as is_last:
                        (loss_of(model(some), wanted) / 4).backward()
                    passes.append(is_last)
            optimizer.step()
            optimizer.zero_grad()
            counts.append(monitor.calls["all_reduce"] + monitor.calls["reduce_scatter"])
        wanted_all, got = reference(), whole(model)
        worst = max((got[name] - one).abs().max().item() for name, one in wanted_all.items())
        found[kind] = {"counts": counts, "passes": passes, "difference": worst}
    return found


def drifting_apart() -> Found:
    plan = prepared(new_model(), "ddp")
    model = plan.model
    optimizer = plan.local_sgd(optimizer_of(model), every=2)
    differences = []
    for step in range(4):
        inputs, targets = (one.tensor_split(2)[dist.get_rank()] for one in batch(step))
        loss_of(model(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
        differences.append(rank_difference(model))
    return {"differences": differences}


def means() -> Found:
    rank = dist.get_rank()
    tensors = [torch.full((2**18,), float(rank + number)) for number in range(6)]
    tensors.append(torch.full((3,), rank, dtype=torch.float64))
    number = all_reduce_mean(tensors, bucket_mb=2)
    return {
        "values": [one[0].item() for one in tensors],
        "same": [bool((one == one[0]).all()) for one in tensors],
        "number": number,
    }


def clipped(*strategies: Strategy) -> Found:
    """Return the norm of the whole gradient before and after clipping, by strategy and in one process."""
    alone = new_model()
    inputs, targets = batch(0)
    loss_of(alone(inputs), targets).backward()
    found: Found = {"one process": [nn.utils.clip_grad_norm_(alone.parameters(), 0.5).item(), 0.5]}
    for strategy in strategies:
        plan = prepared(new_model(), strategy, loss=loss_of)
        index, count = plan.data_shard
        inputs, targets = (one.tensor_split(count)[index] for one in batch(0))
        plan.forward_backward(inputs, targets, loss_of)
        found[f"{strategy.kind} {strategy.names} {dict(strategy.options)}"] = [
            plan.clip_gradients(0.5).item(),
            plan.clip_gradients(9.0).item(),
        ]
    return found


def whole_state() -> Found:
    plan, _ = trained(make_strategy("fsdp", 2))
    state = plan.full_state_dict()
    wanted = reference()
    found: Found = {"kept": len(state) if dist.get_rank() else -1}
    if dist.get_rank() == 0:
        assert set(wanted) == set(state)
        found["difference"] = max((state[name] - one).abs().max().item() for name, one in wanted.items())
    return found


def fused(name: str, width: int) -> nn.Module:
    """Return attention on vectors of 8 with query, key and value in one matrix."""
    model = nn.Module()
    model.add_module(name, nn.Linear(8, width))
    model.add_module("out", nn.Linear(8, 8))
    return model


def refusals() -> Found:
    """Return the errors of invalid calls, which all fail before any communication."""
    wrong: dict[str, Callable[[], object]] = {
        "ranks": lambda: prepared(new_model(), Strategy(kind="ddp", shape=(5,), names=("dp",))),
        "loss": lambda: prepared(new_model(), "pipeline"),
        "trace": lambda: prepared(Shifted(), "pipeline", loss=loss_of),
        "plan": lambda: prepared(Shifted(), "tp"),
        "unknown plan": lambda: prepared(Shifted(), "tp", plan={"thrid": "colwise"}),
        "fused by name": lambda: prepared(fused("c_attn", 16), "tp", plan={"c_attn": "colwise", "out": "rowwise"}),
        "fused by shape": lambda: prepared(fused("mixed", 24), "tp", plan={"mixed": "colwise", "out": "rowwise"}),
        "heads": lambda: prepared(Gpt(heads=1, hidden=32), "tp"),
        "sequence": lambda: prepared(
            new_model(), "tp", plan={"*.up_proj": "colwise", "*.down_proj": "rowwise"}, sequence_parallel=True
        ),
        "layers": lambda: prepared(Shifted(), "ddp", activation_checkpointing=True),
        "class": lambda: prepared(new_model(), "fsdp", transformer_layer_cls=["Blok"]),
        "call": lambda: prepared(new_model(), "pipeline", loss=loss_of).model(torch.ones(1)),
        "interleaved": lambda: prepared(Shifted(), "pipeline", loss=loss_of, schedule="interleaved_1f1b"),
        "stages": lambda: prepared(nn.Sequential(nn.Linear(2, 2)), "pipeline", loss=loss_of),
        "same point": lambda: prepared(
            new_model(), "pipeline", loss=loss_of, schedule="interleaved_1f1b", split_points=["head"] * 3
        ),
        "first child": lambda: prepared(new_model(), "pipeline", loss=loss_of, split_points=["embedding"]),
        "unknown module": lambda: prepared(
            Shifted(), "pipeline", loss=loss_of, example=(torch.ones(2, 8), torch.ones(2, 8)), split_points=["third"]
        ),
        "option": lambda: prepared(new_model(), "fsdp", mixd_precision="bf16"),
        "option of the spec": lambda: prepared(new_model(), "ddp", bucket_cap=1),
        "word": lambda: prepared(new_model(), "fsdp", mixed_precision="bf17"),
        "kind and option": lambda: prepared(new_model(), "ddp", cpu_offload=True),
        "options": lambda: prepared(new_model(), "ddp", compression="bf16", sync_gradients_every=2),
        "option on top": lambda: prepared(new_model(), make_strategy("fsdp", 2), compression="bf16"),
        "data parallel": lambda: prepared(nn.DataParallel(new_model()), "ddp"),
        "kind": lambda: prepared(new_model(), "zero"),
        "local": lambda: prepared(new_model(), "fsdp").local_sgd(optimizer_of(new_model()), every=2),
        "compression": lambda: prepared(new_model(), "ddp", compression="zip"),
    }
    found = {}
    for name, call in wrong.items():
        try:
            call()
            found[name] = "nothing"
        except (ValueError, TypeError) as error:
            found[name] = str(error)
    return found


CHECKS: dict[int, dict[str, Callable[[], Found]]] = {
    2: {
        "ddp": made("ddp"),
        "ddp static graph": made("ddp", static_graph=True, gradient_as_bucket_view=False),
        "ddp checkpointed": made("ddp", activation_checkpointing=True),
        "fsdp": made("fsdp"),
        "fsdp SHARD_GRAD_OP": made("fsdp", sharding_strategy="SHARD_GRAD_OP", auto_wrap_policy="none"),
        "fsdp NO_SHARD": made("fsdp", sharding_strategy="NO_SHARD"),
        "fsdp by size": made("fsdp", auto_wrap_policy="size", min_num_params=5000),
        "fsdp by class, checkpointed": made("fsdp", transformer_layer_cls=["Block"], activation_checkpointing=True),
        "fsdp offloaded": made("fsdp", cpu_offload=True),
        "fsdp bf16": made("fsdp", mixed_precision="bf16", reduce_dtype="fp32"),
        "tp": made("tp"),
        "tp by plan": made("tp", plan={"block*.mlp.up_proj": "colwise", "block*.mlp.down_proj": "rowwise"}),
        "tp of sequences": made("tp", sequence_parallel=True),
        "pipeline gpipe": made("pipeline", schedule="gpipe", micro_batches=4),
        "pipeline 1f1b": made("pipeline", micro_batches=4),
        "pipeline interleaved": made("pipeline", schedule="interleaved_1f1b", micro_batches=4),
        "pipeline cut": made("pipeline", split_points=["head"]),
        "traced pipeline": traced_pipeline,
        "pipeline in bfloat16": pipeline_in_bfloat16,
        "frozen replicas": frozen_replicas,
        "sequence parts": sequence_parts,
        "compression": compression,
        "powersgd": powersgd_sends_less,
        "buckets": buckets,
        "accumulation": accumulation,
        "local sgd": drifting_apart,
        "means": means,
        "clipping": lambda: clipped(
            *(make_strategy(kind, 2) for kind in ("ddp", "fsdp", "tp", "pipeline")),
            make_strategy("tp", 2, {"sequence_parallel": True}),
        ),
        "whole state": whole_state,
        "refusals": refusals,
        **sequences(2),
        **evaluations(2),
        **first_values(2),
    },
    4: {
        "ddp": made("ddp"),
        "fsdp": made("fsdp"),
        "fsdp HYBRID_SHARD": made("fsdp", sharding_strategy="HYBRID_SHARD", shard_size=2),
        "tp": made("tp"),
        "hybrid": made("hybrid", tp_size=2),
        "hybrid checkpointed": made("hybrid", tp_size=2, activation_checkpointing=True),
        "hybrid of sequences": made("hybrid", tp_size=2, sequence_parallel=True, activation_checkpointing=True),
        "pipeline": made("pipeline", micro_batches=8),
        "pipeline of replicas": made("pipeline", stages=2, micro_batches=2),
        "pipeline of replicas, interleaved": made(
            "pipeline", stages=2, micro_batches=2, schedule="interleaved_1f1b", stages_per_rank=3
        ),
        "replicas × tp": made("hybrid", tp_size=2, shard_size=1),
        "stages × tp": made("pipeline", stages=2, tp_size=2, micro_batches=2),
        "stages × shards": made("pipeline", stages=2, shard_size=2, activation_checkpointing=True),
        "stages × shards, interleaved": made(
            "pipeline", stages=2, shard_size=2, micro_batches=2, schedule="interleaved_1f1b", sharding_strategy="SHARD_GRAD_OP"
        ),
        "clipping": lambda: clipped(
            make_strategy("pipeline", 4, {"stages": 2, "tp_size": 2}),
            make_strategy("pipeline", 4, {"stages": 2, "shard_size": 2}),
            make_strategy("hybrid", 4, {"tp_size": 2}),
            make_strategy("fsdp", 4, {"sharding_strategy": "HYBRID_SHARD", "shard_size": 2}),
            make_strategy("pipeline", 4, {"stages": 2}),
        ),
        "mesh groups": mesh_groups,
        "calls without a plan": calls_without_plan,
        **sequences(4),
        **evaluations(4),
        **first_values(4),
    },
    8: {
        "replicas × shards × tp": made("hybrid", tp_size=2, shard_size=2),
        "stages × shards × tp": made("pipeline", stages=2, shard_size=2, tp_size=2, sequence_parallel=True),
        "stages × replicas × tp": made("pipeline", stages=2, tp_size=2, micro_batches=2),
        "stages × replicas × shards": made("pipeline", stages=2, shard_size=2),
        "clipping": lambda: clipped(
            make_strategy("hybrid", 8, {"tp_size": 2, "shard_size": 2}),
            make_strategy("pipeline", 8, {"stages": 2, "shard_size": 2, "tp_size": 2}),
            make_strategy("pipeline", 8, {"stages": 2, "tp_size": 2}),
        ),
        **evaluations(8),
        **first_values(8),
    },
}


if __name__ == "__main__":
    answer(CHECKS)
