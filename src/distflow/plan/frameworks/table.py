"""The table: what ``framework`` and ``launcher`` of a spec lead to."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from distflow.plan.frameworks.accelerate import accelerate
from distflow.plan.frameworks.deepspeed import deepspeed
from distflow.plan.frameworks.jax import jax
from distflow.plan.frameworks.model import Framework, Place, Started
from distflow.plan.frameworks.mpi import horovod, mpi
from distflow.plan.frameworks.pytorch import as_command, spawn, torchrun
from distflow.plan.frameworks.ray import ray
from distflow.plan.frameworks.tensorflow import tensorflow

__all__ = ["FRAMEWORKS", "LAUNCHERS", "start"]

LAUNCHERS: Mapping[str, Framework] = MappingProxyType(
    {"torchrun": Framework(start=torchrun), "spawn": Framework(start=spawn), "command": Framework(start=as_command)}
)
FRAMEWORKS: Mapping[str, Framework] = MappingProxyType(
    {
        "pytorch": Framework(start=as_command),  # its launcher does it
        "deepspeed": Framework(start=deepspeed),
        "accelerate": Framework(start=accelerate),
        "horovod": Framework(start=horovod, ends_with_lead=True),
        "mpi": Framework(start=mpi, ends_with_lead=True),
        "tensorflow": Framework(start=tensorflow),
        "jax": Framework(start=jax),
        "ray": Framework(start=ray, ends_with_lead=True),
        "custom": Framework(start=as_command),
    }
)


def start(framework: str | None, place: Place) -> Started:
    """Return what a task runs: below its launcher when it has one, else as its framework says."""
    if place.launcher.starts_ranks or framework is None:
        return LAUNCHERS[place.launcher.kind].start(place)
    return FRAMEWORKS[framework].start(place)
