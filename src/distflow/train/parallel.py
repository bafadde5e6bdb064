"""The plan that ``world.parallelize(model, …)`` returns: a model, this rank's share of the data, training steps and state."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import Dataset

from distflow.train.communication.gradients import accumulate, begin_step, local_sgd
from distflow.train.loading.batching import Arguments, Batch, BatchSizes, as_arguments, batch_sizes, cut, sample_count
from distflow.train.loading.loader import Loader, Samples, Uneven
from distflow.train.strategies.build import check_connected, make_sequence_mesh, prepare
from distflow.train.strategies.description import Strategy, current_strategy_or_none, resolve_strategy, set_current_strategy
from distflow.train.strategies.options import StrategyOptions
from distflow.train.strategies.stages import Loss, Pipeline

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from distflow.train.loading.loader import LoaderOptions

__all__ = ["ParallelPlan", "parallelize", "world_size"]


def parallelize(
    model: nn.Module,
    strategy: Strategy | StrategyOptions | str | None = None,
    *,
    loss: Loss | None = None,
    example: tuple[torch.Tensor, ...] | None = None,
    weights: str | Path | None = None,
) -> ParallelPlan:
    """Implement ``World.parallelize``, also for process groups that the program created itself."""
    if strategy is None and (strategy := current_strategy_or_none()) is None:
        # Use this kind also on one rank, where `prepare` does not wrap the model, so that it does not depend on the world size.
        strategy = "ddp"
    if isinstance(strategy, Strategy) and strategy.kind != "none" and strategy.world_size > 1:
        check_connected()  # otherwise, the number of ranks may be unknown
    resolved = resolve_strategy(strategy, world_size())
    if weights is None:
        ready = prepare(model, resolved, loss, example)
    else:
        from distflow.train.strategies.weights import load_weights, weight_names  # noqa: PLC0415  it takes a second to import

        ready = prepare(model, resolved, loss, example, weight_names(weights, model))
        load_weights(ready, weights)
    plan = ParallelPlan(ready, resolved, make_sequence_mesh(resolved))
    set_current_strategy(resolved, plan.rank)
    return plan


def world_size() -> int:
    """Return the number of ranks."""
    return dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))


class ParallelPlan:
    """One model that all ranks train together under a strategy."""

    def __init__(self, model: nn.Module, strategy: Strategy, sequence_mesh: DeviceMesh | None = None) -> None:
        self.model = model
        """This rank's model: unchanged, in ``DistributedDataParallel``, with shards as parameters, or stages of a pipeline.

        Create the optimizer from its parameters. Call the model as before, except for a pipeline or under context parallelism.
        """
        self.strategy = strategy
        """The strategy on the mesh of all ranks."""
        self.rank = dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", "0"))
        """This process's number among all ranks."""
        self._sequence_mesh = sequence_mesh
        if self._sequence_mesh is not None:
            self._is_divided = False
            model.register_forward_pre_hook(self._check_divided)

    # -- data ---------------------------------------------------------------------------------------------------------

    @property
    def data_shard(self) -> tuple[int, int]:
        """This rank's share of the data and the number of shares: ``rank`` and ``num_replicas`` of a ``DistributedSampler``.

        Ranks of one tensor-parallel or sequence-parallel group, and the stages of one pipeline, have the same share.
        """
        return self.strategy.data_shard(self.rank)

    def loader(
        self, dataset: Dataset[Any] | Samples, batch_size: int, *, shuffle: bool = True, seed: int = 0, uneven: Uneven = "pad",
        **options: Unpack[LoaderOptions],
    ) -> Loader:  # fmt: skip
        """Return a loader of this rank's share of a dataset, in batches of ``batch_size`` samples. Not collective.

        The arguments are those of ``Loader``. Raises ``ValueError``, and ``TypeError`` for a dataset without a length.
        """
        rank, size = self.data_shard
        return Loader(dataset, batch_size, shuffle=shuffle, seed=seed, uneven=uneven, rank=rank, world_size=size, **options)

    def batch_sizes(self, *, global_batch_size: int | None = None, per_rank_batch_size: int | None = None) -> BatchSizes:
        """Return the sizes of one step in samples; without arguments, those of the strategy. Not collective.

        ``per_rank`` of the result is the size of the batches for ``forward_backward``, which divides them itself. Raises
        ``ValueError`` if the sizes do not fit each other or the number of shares, or if the strategy has none.
        """
        whole, shares = global_batch_size, self.data_shard[1]
        if whole is None and per_rank_batch_size is None and (whole := self.strategy.batch_size) is None:
            raise ValueError("give global_batch_size or per_rank_batch_size: the strategy of the plan sets no batch size")
        return batch_sizes(global_batch_size=whole, per_rank_batch_size=per_rank_batch_size, shares=shares)

    # -- steps --------------------------------------------------------------------------------------------------------

    def forward_backward(self, inputs: Batch, targets: Batch, loss: Loss, *, micro_batches: int | None = None) -> torch.Tensor:
        """Run the forward and backward passes of one step on this rank's batch, and return the mean loss of the batch.

        Collective: all ranks call it, each with its own share (``data_shard``). Then step the optimizer and zero the gradients.

        ``inputs`` is a tensor of shape (samples, …), a mapping of such tensors (the model is called with the keys as names, as
        models of Hugging Face are), or a tuple (one argument each). ``targets`` is of the same kinds, or ``None``; a pipeline
        takes one tensor. All tensors are on this rank's device, and are divided along their first dimension into
        ``micro_batches``, by default the strategy's ``gradient_accumulation_steps``. Gradients are reduced over the ranks
        in the last pass, but not under ``local_sgd`` after its warm-up. ``loss(outputs, targets)`` returns a mean over samples,
        with a gradient. A pipeline uses its own number of micro-batches and the loss that it was created with.

        The result is the mean of this rank's batch: a scalar without a gradient, in the dtype of the loss. All stages of a
        pipeline get it, in torch's default dtype. Raises ``ValueError`` for a batch that cannot be cut into the micro-batches
        or has no samples, and ``TypeError`` if the targets of a pipeline are not a tensor.
        """
        count = self.strategy.passes if micro_batches is None else micro_batches
        if isinstance(self.model, Pipeline):
            return self.model.step(inputs, targets)
        samples = sample_count(inputs)
        if not samples:
            raise ValueError("the batch has no samples: give every rank at least one")
        if not 1 <= count <= samples:
            setting = "the strategy's `gradient_accumulation_steps`" if micro_batches is None else "`micro_batches`"
            raise ValueError(
                f"a batch of {samples} sample{'s' * (samples != 1)} cannot be cut into {count} micro-batches: use a larger "
                f"batch, or set {setting} to a number from 1 to {samples}"
            )
        begin_step(self.model)
        losses = []
        for some, wanted in zip(cut("inputs", inputs, count, samples), cut("targets", targets, count, samples), strict=True):
            with accumulate(self.model, count, sync_every=self._sync_every), self._divided(some, wanted) as (arguments, part):
                share = loss(self._call_model(arguments), part) * (sample_count(some) / samples)
                share.backward()
            losses.append(share.detach())
        total = torch.stack(losses).sum()
        if self._sequence_mesh is not None:
            dist.all_reduce(total, group=self._sequence_mesh.get_group())
            total /= self._sequence_mesh.size()
        return total

    def evaluate(self, inputs: Batch, targets: Batch, loss: Loss) -> torch.Tensor:
        """Return the mean loss of a batch over the shares of all ranks, without gradients and in evaluation mode.

        Collective: all ranks call it, each with its own share of at least one sample; shares may differ in size. The arguments
        are those of ``forward_backward``. ``loss`` may be any mean over samples, such as accuracy. The result is a scalar that
        is equal on every rank. Raises ``ValueError`` for a share without samples.
        """
        model, samples = self.model, sample_count(inputs)
        if not samples:
            raise ValueError("evaluate() was given no samples; every rank needs at least one")
        with torch.no_grad(), _evaluating(model):
            if isinstance(model, Pipeline):
                mean = model.evaluate(inputs, targets, loss)
            else:
                with self._divided(inputs, targets) as (arguments, part):
                    mean = loss(self._call_model(arguments), part)
            if not dist.is_initialized():
                return mean
            # Equally many ranks hold each share, so the mean over ranks is the mean over shares.
            total = torch.stack([mean.double() * samples, mean.new_tensor(samples, dtype=torch.float64)])
            dist.all_reduce(total)
            return (total[0] / total[1]).to(mean.dtype)

    def _call_model(self, arguments: Arguments) -> Any:
        return self.model(*arguments[0], **arguments[1])

    @contextmanager
    def _divided(self, inputs: Batch, targets: Batch) -> Iterator[tuple[Arguments, Batch]]:
        """Yield the arguments of the model and the targets; under context parallelism, this rank's part of their sequences."""
        if self._sequence_mesh is None:
            yield as_arguments(inputs), targets
            return
        from distflow.train.strategies.sequences import part_of_sequences  # noqa: PLC0415  it takes a second to import

        with part_of_sequences(self._sequence_mesh, inputs, targets) as batch:
            self._is_divided = True
            try:
                yield batch
            finally:
                self._is_divided = False

    def _check_divided(self, _model: nn.Module, _inputs: object) -> None:
        if not self._is_divided:
            raise TypeError(
                "the model cannot be called directly with context parallelism: call plan.forward_backward or plan.evaluate, "
                "which divide the sequences"
            )

    def accumulate(self, every: int | None = None) -> AbstractContextManager[bool]:
        """Return a context for one forward and backward pass; each ``every``-th pass reduces the gradients over the ranks.

        Collective (DDP: only in the pass that reduces). Yields true in that pass; then step the optimizer and zero gradients.
        ``every`` is by default the strategy's ``gradient_accumulation_steps``. Divide the loss by it::

            for inputs, targets in micro_batches:
                with plan.accumulate(every=4) as is_last:
                    (loss_of(plan.model(inputs), targets) / 4).backward()
                if is_last:
                    optimizer.step()
                    optimizer.zero_grad()

        Raises ``ValueError`` for ``every`` below 1.
        """
        return accumulate(self.model, self.strategy.passes if every is None else every, sync_every=self._sync_every)

    def clip_gradients(self, max_norm: float) -> torch.Tensor:
        """Scale the gradients to a norm of at most ``max_norm`` over the whole model, and return the norm before clipping.

        Collective: all ranks call it, after the gradients are reduced. The result is a float32 scalar, equal on every rank.
        Raises ``ValueError`` for a negative norm.
        """
        from distflow.train.strategies.clipping import clip_gradients  # noqa: PLC0415  it imports DTensor, which takes a second

        return clip_gradients(self.model, max_norm)

    def local_sgd(
        self, optimizer: torch.optim.Optimizer, *, every: int | None = None, warmup_steps: int = 0
    ) -> torch.optim.Optimizer:
        """Return an optimizer that averages the parameters over all ranks at every ``every``-th step (post-local SGD).

        ``every`` is by default the strategy's ``sync_gradients_every``. With 1, or on one rank, the given optimizer is
        returned. After ``warmup_steps`` ordinary steps, gradients are no longer sent. Steps of the result are collective.
        Raises ``TypeError`` for a model not in DDP, ``RuntimeError`` with ``compression``, ``ValueError`` for ``every`` < 1.
        """
        return local_sgd(self.model, optimizer, every=self._sync_every if every is None else every, warmup_steps=warmup_steps)

    # -- state --------------------------------------------------------------------------------------------------------

    def full_state_dict(self) -> dict[str, Any]:
        """Return the whole model's parameters and buffers on the CPU of rank 0, by their names in the original model.

        Collective. Other ranks get an empty dictionary. Under a pipeline, each rank gets its own stages. Between two averages
        of ``local_sgd``, parameters are the mean over the ranks.
        """
        from distflow.train.strategies.states import full_state_dict  # noqa: PLC0415  it imports torch's checkpoints

        return full_state_dict(self.model)

    def model_state(self) -> dict[str, torch.Tensor]:
        """Return the whole model's parameters and buffers on the CPU of every rank, by their names in the original model.

        Collective. Between two averages of ``local_sgd``, parameters are the mean over the ranks.
        """
        from distflow.train.strategies.weights import whole_tensors  # noqa: PLC0415  it imports torch's checkpoints

        return {name: value.detach().to("cpu", copy=True) for name, value in whole_tensors(self.model, all_names=True)}

    def load_model_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """Load weights that ``model_state`` returned, under any strategy.

        Collective. Only rank 0's ``state`` is used. Raises ``RuntimeError``, on all ranks, if the names are not those
        of this model.
        """
        from distflow.train.strategies.states import load_model_state  # noqa: PLC0415  it imports torch's checkpoints

        load_model_state(self.model, state)

    def save_weights(self, directory: str | Path, *, max_file_size: int = 5_000_000_000) -> None:
        """Write the whole model's parameters and buffers to safetensors files that ``from_pretrained`` of transformers reads.

        Collective: all ranks gather one tensor after the other. Rank 0 creates the directory, writes, and holds about one file
        in memory: at most ``max_file_size`` bytes, or one larger tensor. Weights that were in the directory are replaced. A
        model of Hugging Face writes its ``config.json`` too. Needs the package safetensors.
        """
        from distflow.train.strategies.weights import save_weights  # noqa: PLC0415  it imports torch's checkpoints

        save_weights(self.model, directory, max_file_size=max_file_size)

    @property
    def _sync_every(self) -> int:
        return int(self.strategy.options.get("sync_gradients_every", 1))


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Put a model into evaluation mode; afterwards, restore the mode of each module and free gathered parameters."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True
        for module in (*model.modules(), *(model.stages if isinstance(model, Pipeline) else ())):
            # FSDP2 modules keep gathered parameters until a backward pass.
            if (reshard := getattr(module, "reshard", None)) is not None:
                reshard()
