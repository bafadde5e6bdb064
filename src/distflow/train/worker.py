"""A worker as reinforcement learning uses it: it takes training steps, and hands its weights to others and back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict

__all__ = ["Worker"]


class Worker:
    """A model with its optimizer, under any strategy. Every method is called on all ranks of the model."""

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, loss_of: Callable[[nn.Module, Any], torch.Tensor]
    ) -> None:
        """``loss_of(model, batch)`` returns the loss to be lowered, a tensor of one element."""
        self.model, self.optimizer, self._loss_of = model, optimizer, loss_of

    def train_step(self, batch: Any) -> float:
        """Take one step on this rank's batch; return this rank's loss before it."""
        self.model.train()
        self.optimizer.zero_grad()
        loss = self._loss_of(self.model, batch)
        loss.backward()
        self.optimizer.step()
        return loss.item()

    def get_model_state(self) -> dict[str, torch.Tensor]:
        """Return all weights, whole and on the CPU, on every rank, under the names of the model without any strategy."""
        state = get_model_state_dict(self.model, options=StateDictOptions(full_state_dict=True))
        return {name: value.detach().cpu().clone() for name, value in state.items() if isinstance(value, torch.Tensor)}

    def set_model_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """Take over the weights that rank 0 gives, as ``get_model_state`` returns them; other ranks may give none.

        Raises ``RuntimeError`` when they are not of this model.
        """
        together = dist.is_initialized()
        set_model_state_dict(
            self.model, dict(state), options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=together)
        )
