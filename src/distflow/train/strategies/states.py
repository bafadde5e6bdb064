"""State dictionaries of sharded and pipelined models and their optimizers, with the parameter names of the whole model."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)

from distflow.train.communication.gradients import means_of
from distflow.train.communication.votes import from_all, from_first
from distflow.train.strategies.stages import Pipeline, inner_module

__all__ = ["first_names", "full_state_dict", "load_model_state", "set_training_state", "training_state"]


def full_state_dict(model: nn.Module) -> dict[str, Any]:
    """Implement ``ParallelPlan.full_state_dict``."""
    if isinstance(model, Pipeline):
        own: dict[str, Any] = get_model_state_dict(model.part, options=StateDictOptions(full_state_dict=True))
        return {name: tensor.cpu() for name, tensor in own.items()}
    means = means_of(model)
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    return {name: means[name].cpu() if name in means else value for name, value in state.items()}


def load_model_state(model: nn.Module, state: Mapping[str, torch.Tensor]) -> None:
    """Implement ``ParallelPlan.load_model_state``."""
    held, is_pipeline = inner_module(model), isinstance(model, Pipeline)
    own = [name for name, value in get_model_state_dict(held).items() if isinstance(value, torch.Tensor)]
    # All ranks check the names: if only one rank raised, the other ranks would hang in the broadcast.
    names, known = set(from_first(list(state))), {name for names in from_all(own) for name in names}
    groups = (("missing", known - names), ("unknown", names - known))
    wrong = [f"{kind}: {first_names(some, 20)}" for kind, some in groups if some]
    if wrong:
        raise RuntimeError(f"the weights do not fit this model: {'; '.join(wrong)}")
    together = dist.is_initialized() and not is_pipeline
    given: dict[str, Any] = from_first(dict(state)) if is_pipeline else {} if together and dist.get_rank() else dict(state)
    weights = {name: value for name, value in given.items() if name in own}
    set_model_state_dict(held, weights, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=together))


def first_names(names: Collection[str], most: int) -> str:
    """Return the first ``most`` names in alphabetical order, and the number of the others."""
    more = len(names) - most
    return ", ".join(sorted(names)[:most]) + (f" and {more} more" if more > 0 else "")


def training_state(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    group: dist.ProcessGroup | None = None,
    *,
    saved: Collection[str] | None = None,
) -> dict[str, Any]:
    """Return this rank's part of the state of ``model`` and ``optimizer``, under names that do not depend on the strategy.

    Without ``saved``, the result is the state for this rank to save. With ``saved``, the names in a checkpoint, it is the
    state to load into; it has optimizer states only if they were saved. In a pipeline, it has the tensors of this rank's
    stage, and the optimizer's ``param_groups`` of all stages. Collective over ``group``. Raises ``TypeError`` for LBFGS.
    """
    # Under local SGD, save the mean of the ranks' parameters, but the optimizer states of rank 0.
    means = means_of(model) if saved is None else {}
    left_out = _buffers_of_others(model) if saved is None else frozenset()
    if optimizer is None:
        return {"model": {**_without(left_out, get_model_state_dict(inner_module(model))), **means}}
    averager: PeriodicModelAverager | None = getattr(optimizer, "averager", None)
    optimizer = _inner(optimizer)
    if isinstance(optimizer, torch.optim.LBFGS):
        # torch creates the states to load into by a step without a closure, which LBFGS needs.
        raise TypeError("the state of LBFGS cannot be restored: save and load the model without the optimizer")
    is_new = not optimizer.state
    if is_new and saved is not None:
        optimizer.zero_grad()  # torch creates states to load into only without gradients
    model_state, optimizer_state = get_state_dict(inner_module(model), optimizer)
    states: dict[str, Any] = optimizer_state["state"]  # type: ignore[assignment]
    if is_new:
        # torch took a step to create these states. Without them, the optimizer counts as never stepped, as before.
        optimizer.state.clear()
    if saved is not None:
        stepped = {name for name, values in states.items() if any(f"optimizer.state.{name}.{key}" in saved for key in values)}
        optimizer_state["state"] = {name: states[name] for name in states if name in stepped}
    elif is_new or (averager is not None and dist.get_rank(group) > 0):
        # Under local SGD, ranks have different states: only rank 0 saves them.
        optimizer_state["state"] = {}
    if isinstance(model, Pipeline):
        optimizer_state["param_groups"] = _merge_groups(from_all(optimizer_state["param_groups"], group))  # type: ignore[arg-type]
    state: dict[str, Any] = {"model": {**_without(left_out, model_state), **means}, "optimizer": optimizer_state}
    if averager is None:
        return state
    if saved is None or "averager.step" in saved:
        state["averager"] = {"step": averager.step}
    return state


def set_training_state(model: nn.Module, optimizer: torch.optim.Optimizer | None, state: Mapping[str, Any]) -> None:
    """Load a state that ``training_state`` returned for this model, with values that may have been saved under any strategy."""
    held = inner_module(model)
    optimizer_state = dict(state.get("optimizer", {}))
    if optimizer_state and isinstance(model, Pipeline):
        own = {name for name, _ in held.named_parameters()}
        optimizer_state["param_groups"] = [
            {**one, "params": names}
            for one in optimizer_state["param_groups"]
            if (names := [name for name in one["params"] if name in own])
        ]
    # Not strict: parameters that were never stepped have no optimizer state.
    set_state_dict(
        held, _inner(optimizer) if optimizer else (), model_state_dict=state["model"], optim_state_dict=optimizer_state,
        options=StateDictOptions(strict=False),
    )  # fmt: skip
    if optimizer is not None and (averager := getattr(optimizer, "averager", None)) is not None:
        averager.step = state.get("averager", {"step": 0})["step"]
        # Loading has replaced the groups: a scheduler must change the groups that the optimizer uses.
        optimizer.param_groups = _inner(optimizer).param_groups


def _buffers_of_others(model: nn.Module) -> frozenset[str]:
    """Return the names of the buffers that this rank does not save.

    Buffers such as the statistics of BatchNorm differ between ranks. Only the first rank saves them: DDP also copies the
    buffers of rank 0 to the others.
    """
    is_first = model.is_first_holder if isinstance(model, Pipeline) else dist.get_rank() == 0
    return frozenset() if is_first else frozenset(name for name, _ in inner_module(model).named_buffers(remove_duplicate=False))


def _without(names: Collection[str], state: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in state.items() if name not in names}


def _inner(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return the optimizer inside of the wrapper of ``local_sgd``, if any."""
    inner: torch.optim.Optimizer = getattr(optimizer, "optim", optimizer)
    return inner


def _merge_groups(stages: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Merge the groups of all stages that have the same position, and differ only in their parameters."""
    merged: list[tuple[int, dict[str, Any]]] = []
    for groups in stages:
        for position, one in enumerate(groups):
            for known_position, known in merged:
                if known_position == position and {**known, "params": ()} == {**one, "params": ()}:
                    known["params"] = list(dict.fromkeys([*known["params"], *one["params"]]))
                    break
            else:
                merged.append((position, dict(one)))
    return [one for _, one in merged]
