"""Pipelines: the model in stages on different ranks, through which micro-batches flow (GPipe, 1F1B or interleaved 1F1B)."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, chain, pairwise
from math import gcd
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from distflow.train.communication.gradients import all_reduce_mean, local_gradients
from distflow.train.loading.batching import Batch, as_arguments, sample_count, shape_of
from distflow.train.strategies.options import MESH_SIZES

__all__ = ["Loss", "Pipeline", "balanced_parts", "inner_module", "make_pipeline"]

Loss = Callable[[Any, Any], torch.Tensor]
"""Maps the outputs and targets of a batch or micro-batch to its mean loss."""

_Schedules = Callable[[int, bool], Any]
"""Returns a torch schedule for batches of one shape, by the number of micro-batches and whether to run the backward pass."""


class Pipeline(nn.Module):
    """This rank's stages, and the schedules by which micro-batches flow through all stages.

    It has the parameters of this rank's stages. In checkpoints and in ``part``, they have their names in the whole model.
    """

    def __init__(
        self,
        part: nn.Module,
        stages: Sequence[nn.Module],
        schedules: _Schedules,
        micro_batches: int,
        mesh: DeviceMesh,
        device: torch.device,
        min_round_size: int = 1,
    ) -> None:
        super().__init__()
        self.part = part
        """The module of this rank's stages."""
        self.stages = tuple(stages)
        """This rank's stages, one module each. FSDP shards them separately."""
        self.micro_batches = micro_batches
        """The number of micro-batches. Batches that cannot be divided equally are cut into fewer."""
        self.is_first = mesh.get_local_rank("pp") == 0
        """Whether this rank passes the inputs to the first stage."""
        self.is_last = mesh.get_local_rank("pp") == mesh["pp"].size() - 1
        """Whether this rank computes the loss."""
        axes = [axis for axis in mesh.mesh_dim_names or () if axis != "pp"]
        self.is_first_holder = not any(map(mesh.get_local_rank, axes))
        """Whether this rank is the first of those that hold the same stages."""
        self._replicas = mesh["dp"].get_group() if "dp" in axes and "fsdp" not in axes else None
        """The ranks over which ``step`` averages gradients; ``None`` without replicas, or with FSDP, which averages them."""
        self._shards = mesh["fsdp"].get_group() if "fsdp" in axes else None
        self._group = mesh["pp"].get_group()
        self._schedules, self._device, self._min_round_size = schedules, device, min_round_size
        self._cached: dict[bool, tuple[tuple[int, tuple[torch.Size, ...]], Any]] = {}

    def step(self, inputs: Batch, targets: torch.Tensor) -> torch.Tensor:
        """Run the forward and backward pass of a batch, and return its mean loss on every rank of the pipeline.

        Call this with the same batch on every rank of the pipeline. Its first dimension is cut into the micro-batches. The
        first stage is called with the tensors of a tuple one by one, and with those of a mapping by their names. The mean
        gradient of the micro-batches is added to the existing ones. Raises ``TypeError`` if the targets are not a tensor, and
        ``ValueError`` without samples.
        """
        if not isinstance(targets, torch.Tensor):
            raise TypeError(f"the targets of a pipeline must be one tensor, not a {type(targets).__name__}")
        losses: list[torch.Tensor] = []
        positional, named = as_arguments(inputs) if self.is_first else ((), {})
        self._schedule(inputs, trains=True).step(
            *positional, **named, **({"target": targets, "losses": losses} if self.is_last else {})
        )
        if self._replicas is not None:
            all_reduce_mean(local_gradients(self.part.parameters()), group=self._replicas)
        return self._from_last(torch.stack(losses).sum() if losses else None)

    def evaluate(self, inputs: Batch, targets: Batch, loss: Loss) -> torch.Tensor:
        """Run the forward pass of a batch without gradients, and return its mean loss on every rank of the pipeline.

        Call this with the same batch on every rank of the pipeline. The last stage calls ``loss`` with the whole batch; it may
        differ from the training loss.
        """
        with torch.no_grad():
            positional, named = as_arguments(inputs) if self.is_first else ((), {})
            outputs = self._schedule(inputs, trains=False).step(*positional, **named)
            return self._from_last(loss(outputs, targets) if self.is_last else None)

    def _schedule(self, inputs: Batch, *, trains: bool) -> Any:
        """Return a schedule for batches of this shape: a torch schedule accepts only the shape of its first batch."""
        if not (samples := sample_count(inputs)):
            raise ValueError("the batch has no samples: each rank of a pipeline needs at least one")
        if self._shards is not None:
            # Each micro-batch gathers the shards, so ranks that share them need the same number of micro-batches.
            found = [torch.zeros(1, dtype=torch.int64, device=self._device) for _ in range(dist.get_world_size(self._shards))]
            dist.all_gather(found, torch.full_like(found[0], samples), group=self._shards)
            samples = gcd(*(int(one) for one in found))
        key, schedule = self._cached.get(trains, (None, None))
        if key != (samples, shape_of(inputs)):
            # Micro-batches have one size: receive buffers need it, and so does the mean of their losses. An interleaved
            # schedule divides them into equal rounds of at least `min_round_size` micro-batches, or one smaller round.
            sizes = [number for number in range(1, self.micro_batches + 1) if samples % number == 0]
            count = max(number for number in sizes if number % max(1, number // self._min_round_size) == 0)
            schedule = self._schedules(count, trains)
            self._cached[trains] = (samples, shape_of(inputs)), schedule
        return schedule

    def _from_last(self, loss: torch.Tensor | None) -> torch.Tensor:
        """Return the last stage's scalar on all ranks of the pipeline.

        It has torch's default dtype, because the other stages do not know its own.
        """
        value = torch.zeros((), device=self._device) if loss is None else loss.detach().to(torch.get_default_dtype())
        dist.broadcast(value, dist.get_global_rank(self._group, dist.get_world_size(self._group) - 1), group=self._group)
        return value

    def sum_over_stages(self, value: torch.Tensor) -> torch.Tensor:
        """Return the sum of a value over the stages, on every rank of the pipeline."""
        total = value.detach().to(self._device, copy=True)
        dist.all_reduce(total, group=self._group)
        return total

    def forward(self, *_: Any) -> torch.Tensor:
        """Raise ``TypeError``, because no rank has the whole model."""
        raise TypeError("a pipeline cannot be called: use loss = model.step(inputs, targets), then optimizer.step()")


def inner_module(model: nn.Module) -> nn.Module:
    """Return the module inside of a pipeline or of DDP, whose tensors have their names in the whole model."""
    if isinstance(model, Pipeline):
        return model.part
    return model.module if isinstance(model, DistributedDataParallel) else model


def make_pipeline(
    model: nn.Module,
    mesh: DeviceMesh,
    device: torch.device,
    options: Mapping[str, Any],
    *,
    loss: Loss,
    example: tuple[torch.Tensor, ...] | None,
    divide: Callable[[nn.Module], nn.Module],
) -> Pipeline:
    """Return this rank's stages of the model over the mesh axis ``pp``; ``divide`` divides each stage over the other axes.

    An ``nn.Sequential`` is cut between its children, into parts of about equally many parameters or at ``split_points``. Any
    other model is traced by torch from ``example`` (the inputs of one micro-batch) and cut before ``split_points``; its stages
    can only be replicated. Raises ``ValueError`` for a model that cannot be cut.
    """
    from torch.distributed import pipelining  # noqa: PLC0415  its import takes as long as that of torch

    group, count = mesh["pp"].get_group(), mesh["pp"].size()
    index, points = mesh.get_local_rank("pp"), list(options.get("split_points", ()))
    is_interleaved = options.get("schedule") == "interleaved_1f1b"
    total = count * options.get("stages_per_rank", 2) if is_interleaved else count
    if points and not len(points) == len(set(points)) == total - 1:
        raise ValueError(f"pipeline: {total} stages need {total - 1} different split_points, not {', '.join(points)}")
    if isinstance(model, nn.Sequential):
        parts = _cut_children(model, total, points)
        own = {number: divide(parts[number]) for number in range(index, total, count)}
        part: nn.Module = nn.Sequential(OrderedDict(chain.from_iterable(one.named_children() for one in own.values())))

        def stages() -> list[Any]:
            return [pipelining.PipelineStage(one, number, total, device, group=group) for number, one in own.items()]

    elif unsupported := [
        *(["schedule=interleaved_1f1b"] if is_interleaved else []),
        *(["activation_checkpointing"] if options.get("activation_checkpointing") else []),
        *(option for option, axis in MESH_SIZES.items() if axis != "pp" and axis in (mesh.mesh_dim_names or ())),
    ]:
        raise ValueError(
            f"pipeline: {type(model).__name__} is not an nn.Sequential, so it cannot be combined with "
            f"{', '.join(unsupported)}: use an nn.Sequential, or remove {'it' if len(unsupported) == 1 else 'them'}"
        )
    elif example is None or not points:
        raise ValueError(
            f"pipeline: {type(model).__name__} is not an nn.Sequential, so torch must trace it, which needs split_points and "
            "example. Set split_points to the modules at which stages 2, 3, … begin, and pass the inputs of one micro-batch: "
            "parallelize(…, example=(x,))"
        )
    elif any(tensor.is_meta for tensor in model.parameters()):
        raise ValueError("pipeline: a model on the meta device cannot be traced: use an nn.Sequential, or create it on the CPU")
    else:
        try:
            pipe = pipelining.pipeline(model, example, split_spec=dict.fromkeys(points, pipelining.SplitPoint.BEGINNING))
        except AttributeError as error:  # an unknown module, or the first one
            raise ValueError(
                f"pipeline: stages cannot begin at the split_points {', '.join(points)}: {error}; "
                "name modules after the first one"
            ) from error
        part = pipe.get_stage_module(index).to(device)
        own = {index: part}

        def stages() -> list[Any]:
            return [pipelining.build_stage(part, index, pipe.info(), device, group)]

    def schedules(micro_batches: int, trains: bool) -> Any:
        def share(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            return loss(outputs, targets) / micro_batches

        # Without a loss, torch's schedule stops after the forward pass and returns the outputs. With `scale_grads`, it would
        # also divide the gradients of earlier batches.
        settings: dict[str, Any] = {"loss_fn": share if trains else None, "scale_grads": False}
        if is_interleaved:
            return pipelining.ScheduleInterleaved1F1B(stages(), micro_batches, **settings)
        # torch's 1F1B refuses fewer micro-batches than stages.
        is_gpipe = not trains or options.get("schedule") == "gpipe" or micro_batches < count
        schedule = pipelining.ScheduleGPipe if is_gpipe else pipelining.Schedule1F1B
        return schedule(stages()[0], micro_batches, **settings)

    micro = options.get("micro_batches", count)
    return Pipeline(part, list(own.values()), schedules, micro, mesh, device, count if is_interleaved else 1)


def balanced_parts(weights: Sequence[int], count: int) -> list[range]:
    """Divide the weights into ``count`` non-empty ranges so that the heaviest range is as light as possible.

    >>> balanced_parts([4, 1, 1, 1, 1], 2)
    [range(0, 1), range(1, 5)]
    """
    if not 0 < count <= len(weights):
        raise ValueError(f"pipeline: {count} stages need at least {count} top-level layers, and the model has {len(weights)}")
    sums = [0, *accumulate(weights)]
    # best[end]: the weight of the heaviest part, and the cuts, of the best division of the layers before `end`.
    best: list[tuple[int, tuple[int, ...]]] = [(total, (0,)) for total in sums]
    for part in range(1, count):
        best = [
            min(
                ((max(best[cut][0], total - sums[cut]), (*best[cut][1], cut)) for cut in range(part, end)),
                default=(sums[-1] + 1, ()),
            )
            for end, total in enumerate(sums)
        ]
    return [range(first, last) for first, last in pairwise((*best[-1][1], len(weights)))]


def _cut_children(model: nn.Sequential, count: int, points: Sequence[str]) -> list[nn.Sequential]:
    children = list(model.named_children())
    names = [name for name, _ in children]
    if points and count <= len(names):
        if wrong := [point for point in points if point not in names[1:]]:
            raise ValueError(
                f"pipeline: no stage after the first can begin at `{wrong[0]}`: choose split_points from {', '.join(names[1:])}"
            )
        cuts = [0, *sorted(names.index(point) for point in points), len(names)]
        parts = [range(first, last) for first, last in pairwise(cuts)]
    else:
        parts = balanced_parts([sum(one.numel() for one in child.parameters()) for _, child in children], count)
    stages = [nn.Sequential(OrderedDict(children[index] for index in part)) for part in parts]
    holders: dict[nn.Parameter, tuple[int, str]] = {}
    for number, one in enumerate(stages):
        for name, parameter in one.named_parameters():
            first, first_name = holders.setdefault(parameter, (number, name))
            if first != number:
                raise ValueError(
                    f"pipeline: `{first_name}` (stage {first + 1}) and `{name}` (stage {number + 1}) are tied: choose "
                    "split_points so that one stage has both, or untie them"
                )
    return stages
