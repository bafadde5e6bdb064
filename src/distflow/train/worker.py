"""A worker as reinforcement learning uses it: it takes training steps, and hands its weights to others and back."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict

from distflow.train.communication.votes import from_all, from_first
from distflow.train.strategies.stages import Pipeline
from distflow.train.strategies.weights import whole_tensors

__all__ = ["Worker"]


class Worker:
    """A model with its optimizer, under any strategy. Every method is called on all ranks of the model.

    Of a pipeline a batch is a pair of inputs and targets, and the loss is the one that the pipeline was made with.
    """

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, loss_of: Callable[[nn.Module, Any], torch.Tensor]
    ) -> None:
        """``loss_of(model, batch)`` returns the loss to be lowered, a tensor of one element."""
        self.model, self.optimizer, self._loss_of = model, optimizer, loss_of

    def train_step(self, batch: Any) -> float:
        """Take one step on this rank's batch; return this rank's loss before it."""
        self.model.train()
        self.optimizer.zero_grad()
        if isinstance(self.model, Pipeline):
            loss = self.model.step(*batch)
        else:
            loss = self._loss_of(self.model, batch)
            loss.backward()
        self.optimizer.step()
        return loss.item()

    def get_model_state(self) -> dict[str, torch.Tensor]:
        """Return all weights, whole and on the CPU, on every rank, under the names of the model without any strategy.

        Between two averages of ``local_sgd`` they are the mean of the ranks' weights.
        """
        return {name: value.detach().to("cpu", copy=True) for name, value in whole_tensors(self.model, all_names=True)}

    def set_model_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """Load the weights that rank 0 gives, as ``get_model_state`` returns them; those of other ranks are ignored.

        Raises ``RuntimeError`` on all ranks when their names are not those of this model.
        """
        together = dist.is_initialized()
        if isinstance(self.model, Pipeline):
            given, own = from_first(dict(state)), list(self.model.part.state_dict())
            _check_names(given, {name for names in from_all(own) for name in names})
            self.model.part.load_state_dict({name: given[name] for name in own})
            return
        own_state = get_model_state_dict(self.model)
        # A rank that raised alone would leave the others in the broadcast.
        _check_names(
            from_first(list(state)) if together else state,
            {name for name, value in own_state.items() if isinstance(value, torch.Tensor)},
        )
        # For models in DDP, torch renames only the names of rank 0 and refuses those of the others as unexpected.
        weights: dict[str, Any] = dict(state) if not together or dist.get_rank() == 0 else {}
        set_model_state_dict(self.model, weights, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=together))


def _check_names(given: Iterable[str], own: set[str]) -> None:
    if wrong := set(given) ^ own:
        raise RuntimeError(f"the weights are not those of this model: they differ in {', '.join(sorted(wrong))}")
