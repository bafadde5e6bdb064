"""Replicated data parallelism: torch's DistributedDataParallel with the options of a strategy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from distflow.train.communication.gradients import compress_gradients

__all__ = ["replicate"]

_TORCHS = ("bucket_cap_mb", "static_graph", "find_unused_parameters")


def replicate(model: nn.Module, device: torch.device, options: Mapping[str, Any]) -> nn.Module:
    """Return the model wrapped so that its gradients are averaged over all ranks during the backward pass."""
    if not any(parameter.requires_grad for parameter in model.parameters()):
        # Nothing to average, which torch refuses.
        return model
    settings = {name: options[name] for name in _TORCHS if name in options}
    settings["gradient_as_bucket_view"] = options.get("gradient_as_bucket_view", True)
    wrapped = DistributedDataParallel(model, device_ids=[device] if device.type == "cuda" else None, **settings)
    compression = options.get("compression", "none")
    if compression != "none":
        rank = {"rank": options["powersgd_rank"]} if "powersgd_rank" in options else {}
        compress_gradients(wrapped, compression, **rank)
    return wrapped
