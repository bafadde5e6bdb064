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
from train.evaluation_checks import empty_evaluation, evaluation_difference, evaluation_mode
from train.meta_checks import initialization_errors, initialized, unusual_modules
from train.ranks import (
    STEPS,
    Results,
    batch,
    in_float64,
    make_plan,
    new_model,
    optimizer_of,
    reference,
    run_checks,
    whole_parameters,
)
from train.sent import CollectiveCounter
from train.sequence_checks import sequence_checks


def trained(
    strategy: Strategy, *, blocks: int = 2, on_meta: bool = False, clips: bool = False, evaluates: bool = False
) -> tuple[ParallelPlan, nn.Module, Results]:
    """Train under a strategy and in one process. Return the plan, the single-process model and this rank's results.

    With ``on_meta``, the models begin on the meta device.
    """
    if on_meta:
        plan, alone, found = initialized(strategy)
    else:
        # The ranks make different parameters, and have to get those of rank 0.
        plan = make_plan(new_model(dist.get_rank(), blocks), strategy, loss=loss_of)
        alone, found = new_model(0, blocks), {}
    start = {name: parameter.detach().clone() for name, parameter in alone.named_parameters()}
    optimizers = optimizer_of(plan.model), optimizer_of(alone)
    index, count = plan.data_shard
    for step in range(STEPS):
        inputs, targets = batch(step)
        mine = [one.tensor_split(count)[index] for one in (inputs, targets)]
        # Alternate between one and two passes.
        found["loss"] = plan.forward_backward(mine[0], mine[1], loss_of, micro_batches=1 + step % 2).item()
        loss_of(alone(inputs), targets).backward()
        for optimizer in optimizers:
            optimizer.step()
        if clips and not step:
            found["norm"] = nn.utils.clip_grad_norm_(alone.parameters(), 0.5).item()
            found["norms"] = [plan.clip_gradients(maximum).item() for maximum in (0.5, 9.0)]
        for optimizer in optimizers:
            optimizer.zero_grad()
        if evaluates and not step:
            found["evaluations"] = evaluation_difference(plan, alone)
    found["moved"] = max((start[name] - one).abs().max().item() for name, one in alone.named_parameters())
    return plan, alone, found


def compare_training(strategy: Strategy, **more: Any) -> Results:
    plan, alone, found = trained(strategy, **more)
    model = plan.model
    wanted, got = {name: parameter.detach() for name, parameter in alone.named_parameters()}, whole_parameters(model)
    inner = model.part if isinstance(model, Pipeline) else model
    held = sum((one.to_local() if isinstance(one, DTensor) else one).numel() for one in inner.parameters())
    worst = torch.tensor([max((got[name] - wanted[name]).abs().max().item() for name in got), found.get("evaluations", 0.0)])
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    names: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(names, (sorted(got), held, found["loss"]))
    if "evaluations" in found:
        found["evaluations"] = worst[1].item()
    return {
        **found,
        "difference": worst[0].item(),
        "complete": {name for one, _, _ in names for name in one} == set(wanted),
        "shares": [share / sum(one.numel() for one in wanted.values()) for _, share, _ in names],
        "losses": [one for _, _, one in names],
        "children": [sorted({name.partition(".")[0] for name in held}) for held, _, _ in names],
    }


def training_check(kind: str, *also: str, blocks: int = 2, **options: Any) -> Callable[[], Results]:
    """Return a check that compares training with that of one process: in float64, or with mixed precision in float32.

    ``also``: "on_meta" for a model that begins on the meta device, "clips" to also clip gradients, and "evaluates" to also
    evaluate between the steps.
    """

    def check() -> Results:
        strategy = make_strategy(kind, dist.get_world_size(), options)
        return compare_training(strategy, blocks=blocks, **dict.fromkeys(also, True))

    return check if "mixed_precision" in options else in_float64(check)


class Shifted(nn.Module):
    """A model with two inputs, which pipelines trace because it is not an ``nn.Sequential``."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(self.second(torch.tanh(self.first(x + shift))))


def traced_pipeline() -> Results:
    x, shift, y = torch.ones(4, 8), torch.arange(32.0).reshape(4, 8) / 32, torch.zeros(4, 8)
    options = {"split_points": ["second"], "micro_batches": 2}
    plan = make_plan(Shifted(), "pipeline", loss=nn.functional.mse_loss, example=(x[:2], shift[:2]), **options)
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


def pipeline_in_bfloat16() -> Results:
    """Return all ranks' losses and their dtypes for a bfloat16 model. Only the last stage knows the dtype of the loss."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).to(torch.bfloat16)
    plan, x = make_plan(model, "pipeline", loss=nn.functional.mse_loss), torch.ones(2, 4, dtype=torch.bfloat16)
    losses = plan.forward_backward(x, x, nn.functional.mse_loss), plan.evaluate(x, x, nn.functional.mse_loss)
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, [(one.item(), str(one.dtype)) for one in losses])
    return {"losses": found}


def frozen_replicas() -> Results:
    """Return the difference between the ranks' parameters in a model without trainable ones, which DDP does not wrap."""
    model = new_model(seed=dist.get_rank()).requires_grad_(False)
    return {"before": rank_difference(model), "after": rank_difference(make_plan(model, "ddp").model)}


def mesh_groups() -> Results:
    mesh = make_mesh(make_strategy("hybrid", 4, {"tp_size": 2}))
    groups = {axis: sorted(dist.get_process_group_ranks(mesh[axis].get_group())) for axis in ("fsdp", "tp")}
    everyone: list[Any] = [None] * 4
    dist.all_gather_object(everyone, groups)
    return {axis: sorted({tuple(one[axis]) for one in everyone}) for axis in ("fsdp", "tp")}


def sequence_parts() -> Results:
    """Return the lengths that norms get of a sequence of 12 tokens, and the errors for invalid inputs."""
    model, lengths = make_plan(new_model(), "tp", sequence_parallel=True).model, []
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


def compression() -> Results:
    found: Results = {}
    for how in ("none", "fp16", "bf16", "powersgd"):
        model = make_plan(new_model(), "ddp", compression=how).model
        optimizer = optimizer_of(model)
        inputs, targets = (one.tensor_split(2)[dist.get_rank()] for one in batch(0))
        loss_of(model(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
        # DDP has its final buckets only in the second pass.
        with CollectiveCounter() as counter:
            loss_of(model(inputs), targets).backward()
        optimizer.step()
        sent = counter.bytes["all_reduce"]
        found[how] = {
            "ranks": rank_difference(model), "bytes": sent, "parameters": nn.utils.parameters_to_vector(model.parameters())
        }  # fmt: skip
    plain = found["none"]["parameters"]
    for one in found.values():
        one["difference"] = (one.pop("parameters") - plain).abs().max().item()
    return found


def powersgd_sends_less() -> Results:
    model = DistributedDataParallel(new_model())
    compress_gradients(model, "powersgd", rank=1, start_iteration=2)
    sent = []
    for step in range(5):
        inputs, targets = (one.tensor_split(2)[dist.get_rank()] for one in batch(step))
        with CollectiveCounter() as counter:
            loss_of(model(inputs), targets).backward()
        sent.append(counter.bytes["all_reduce"])
    return {"sent": sent}


def buckets() -> Results:
    found = {}
    for size in (1, 5, 25):
        torch.manual_seed(0)
        # Six layers of 1 MiB each.
        model = make_plan(nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(6))), "ddp", bucket_cap_mb=size).model
        x = torch.ones(2, 512)
        model(x).sum().backward()
        with CollectiveCounter() as counter:
            model(x).sum().backward()
        found[str(size)] = counter.calls["all_reduce"]
    return found


def accumulation() -> Results:
    found: Results = {}
    for kind in ("ddp", "fsdp"):
        plan = make_plan(new_model(), kind)
        model = plan.model
        optimizer = optimizer_of(model)
        index = dist.get_rank()
        counts = []
        for step in range(STEPS):
            inputs, targets = (one.tensor_split(2)[index] for one in batch(step))
            passes = []
            with CollectiveCounter() as counter:
                for some, wanted in zip(inputs.split(1), targets.split(1), strict=True):
                    with plan.accumulate(every=4) as is_last:
                        (loss_of(model(some), wanted) / 4).backward()
                    passes.append(is_last)
            optimizer.step()
            optimizer.zero_grad()
            counts.append(counter.calls["all_reduce"] + counter.calls["reduce_scatter"])
        wanted_all, got = reference(), whole_parameters(model)
        worst = max((got[name] - one).abs().max().item() for name, one in wanted_all.items())
        found[kind] = {"counts": counts, "passes": passes, "difference": worst}
    return found


def local_sgd_differences() -> Results:
    plan = make_plan(new_model(), "ddp")
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


def bucketed_means() -> Results:
    rank = dist.get_rank()
    tensors = [torch.full((2**18,), float(rank + number)) for number in range(6)]
    tensors.append(torch.full((3,), rank, dtype=torch.float64))
    number = all_reduce_mean(tensors, bucket_mb=2)
    return {
        "values": [one[0].item() for one in tensors],
        "same": [bool((one == one[0]).all()) for one in tensors],
        "number": number,
    }


def whole_state() -> Results:
    plan, alone, _ = trained(make_strategy("fsdp", 2))
    state = plan.full_state_dict()
    wanted = dict(alone.named_parameters())
    found: Results = {"kept": len(state) if dist.get_rank() else -1}
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


def refusals() -> Results:
    """Return the errors of invalid calls, which all fail before any communication."""
    wrong: dict[str, Callable[[], object]] = {
        "ranks": lambda: make_plan(new_model(), Strategy(kind="ddp", shape=(5,), names=("dp",))),
        "loss": lambda: make_plan(new_model(), "pipeline"),
        "trace": lambda: make_plan(Shifted(), "pipeline", loss=loss_of),
        "plan": lambda: make_plan(Shifted(), "tp"),
        "unknown plan": lambda: make_plan(Shifted(), "tp", plan={"thrid": "colwise"}),
        "fused by name": lambda: make_plan(fused("c_attn", 16), "tp", plan={"c_attn": "colwise", "out": "rowwise"}),
        "fused by shape": lambda: make_plan(fused("mixed", 24), "tp", plan={"mixed": "colwise", "out": "rowwise"}),
        "heads": lambda: make_plan(Gpt(heads=1, hidden=32), "tp"),
        "sequence": lambda: make_plan(
            new_model(), "tp", plan={"*.up_proj": "colwise", "*.down_proj": "rowwise"}, sequence_parallel=True
        ),
        "sequence without norms": lambda: make_plan(nn.Sequential(fused("q", 8), fused("q", 8)), "tp", sequence_parallel=True),
        "layers": lambda: make_plan(Shifted(), "ddp", activation_checkpointing=True),
        "class": lambda: make_plan(new_model(), "fsdp", transformer_layer_cls=["Blok"]),
        "call": lambda: make_plan(new_model(), "pipeline", loss=loss_of).model(torch.ones(1)),
        "interleaved": lambda: make_plan(Shifted(), "pipeline", loss=loss_of, schedule="interleaved_1f1b"),
        "stages": lambda: make_plan(nn.Sequential(nn.Linear(2, 2)), "pipeline", loss=loss_of),
        "same point": lambda: make_plan(
            new_model(), "pipeline", loss=loss_of, schedule="interleaved_1f1b", split_points=["head"] * 3
        ),
        "stages with split points": lambda: make_plan(
            nn.Sequential(nn.Linear(2, 2)), "pipeline", loss=loss_of, split_points=["0"]
        ),
        "first child": lambda: make_plan(new_model(), "pipeline", loss=loss_of, split_points=["embedding"]),
        "unknown module": lambda: make_plan(
            Shifted(), "pipeline", loss=loss_of, example=(torch.ones(2, 8), torch.ones(2, 8)), split_points=["third"]
        ),
        "option": lambda: make_plan(new_model(), "fsdp", mixd_precision="bf16"),
        "option of the spec": lambda: make_plan(new_model(), "ddp", bucket_cap=1),
        "word": lambda: make_plan(new_model(), "fsdp", mixed_precision="bf17"),
        "kind and option": lambda: make_plan(new_model(), "ddp", cpu_offload=True),
        "options": lambda: make_plan(new_model(), "ddp", compression="bf16", sync_gradients_every=2),
        "option on top": lambda: make_plan(new_model(), make_strategy("fsdp", 2), compression="bf16"),
        "data parallel": lambda: make_plan(nn.DataParallel(new_model()), "ddp"),
        "kind": lambda: make_plan(new_model(), "zero"),
        "local": lambda: make_plan(new_model(), "fsdp").local_sgd(optimizer_of(new_model()), every=2),
        "compression": lambda: make_plan(new_model(), "ddp", compression="zip"),
    }
    found = {}
    for name, call in wrong.items():
        try:
            call()
            found[name] = ""
        except (ValueError, TypeError) as error:
            found[name] = str(error)
    return found


CHECKS: dict[int, dict[str, Callable[[], Results]]] = {
    2: {
        "ddp": training_check("ddp", "on_meta", "clips", "evaluates"),
        "ddp static graph": training_check("ddp", static_graph=True, gradient_as_bucket_view=False),
        "ddp checkpointed": training_check("ddp", activation_checkpointing=True),
        "fsdp": training_check("fsdp", "on_meta", "clips", "evaluates"),
        "fsdp SHARD_GRAD_OP": training_check("fsdp", "evaluates", sharding_strategy="SHARD_GRAD_OP"),
        "fsdp NO_SHARD": training_check("fsdp", sharding_strategy="NO_SHARD"),
        "fsdp by size": training_check("fsdp", auto_wrap_policy="size", min_num_params=5000),
        "fsdp by class, checkpointed": training_check("fsdp", transformer_layer_cls=["Block"], activation_checkpointing=True),
        "fsdp offloaded": training_check("fsdp", "on_meta", cpu_offload=True, auto_wrap_policy="none"),
        "fsdp bf16": training_check("fsdp", mixed_precision="bf16", reduce_dtype="fp32"),
        "tp": training_check("tp", "on_meta", "clips", "evaluates"),
        "tp by plan": training_check("tp", plan={"block*.mlp.up_proj": "colwise", "block*.mlp.down_proj": "rowwise"}),
        "tp of sequences": training_check("tp", "clips", sequence_parallel=True),
        "pipeline gpipe": training_check("pipeline", "evaluates", schedule="gpipe", micro_batches=4),
        "pipeline 1f1b": training_check("pipeline", "on_meta", "clips", "evaluates", micro_batches=4),
        "pipeline interleaved": training_check("pipeline", "evaluates", schedule="interleaved_1f1b", micro_batches=4),
        "pipeline cut": training_check("pipeline", split_points=["head"]),
        "traced pipeline": traced_pipeline,
        "pipeline in bfloat16": pipeline_in_bfloat16,
        "frozen replicas": frozen_replicas,
        "sequence parts": sequence_parts,
        "compression": compression,
        "powersgd": powersgd_sends_less,
        "buckets": buckets,
        "accumulation": in_float64(accumulation),
        "local sgd": local_sgd_differences,
        "means": bucketed_means,
        "whole state": in_float64(whole_state),
        "refusals": refusals,
        "initialization errors": initialization_errors,
        "unusual modules": unusual_modules,
        "evaluation mode": evaluation_mode,
        "no samples": empty_evaluation,
        **sequence_checks(2),
    },
    4: {
        "ddp": training_check("ddp"),
        "fsdp HYBRID_SHARD": training_check("fsdp", "on_meta", "clips", sharding_strategy="HYBRID_SHARD", shard_size=2),
        "hybrid": training_check("hybrid", "on_meta", "clips", "evaluates", tp_size=2),
        "hybrid of sequences, checkpointed": training_check(
            "hybrid", tp_size=2, sequence_parallel=True, activation_checkpointing=True
        ),
        "pipeline": training_check("pipeline", "evaluates", micro_batches=8),
        "pipeline of replicas": training_check("pipeline", "on_meta", "clips", "evaluates", stages=2, micro_batches=2),
        "pipeline of replicas, interleaved": training_check(
            "pipeline", blocks=4, stages=2, micro_batches=2, schedule="interleaved_1f1b", stages_per_rank=3
        ),
        "replicas × tp": training_check("hybrid", tp_size=2, shard_size=1),
        "stages × tp": training_check("pipeline", "clips", stages=2, tp_size=2, micro_batches=2),
        "stages × shards": training_check(
            "pipeline", "clips", "evaluates", stages=2, shard_size=2, activation_checkpointing=True
        ),
        "stages × shards, interleaved": training_check(
            "pipeline", stages=2, shard_size=2, micro_batches=2, schedule="interleaved_1f1b", sharding_strategy="SHARD_GRAD_OP"
        ),
        "mesh groups": mesh_groups,
        "calls without a plan": in_float64(calls_without_plan),
        **sequence_checks(4),
    },
    8: {
        "replicas × shards × tp": training_check("hybrid", tp_size=2, shard_size=2),
        "stages × shards × tp": training_check(
            "pipeline", "on_meta", stages=2, shard_size=2, tp_size=2, sequence_parallel=True
        ),
        "stages × replicas × tp": training_check("pipeline", "clips", stages=2, tp_size=2, micro_batches=2),
        "stages × replicas × shards": training_check("pipeline", stages=2, shard_size=2),
    },
}


if __name__ == "__main__":
    run_checks(CHECKS)
