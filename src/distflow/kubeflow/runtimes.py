"""Runtimes: the training frameworks that distflow starts, in one pool. Kubernetes stores them; here they are a table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from distflow.documents.text import did_you_mean
from distflow.kubeflow.backends import class_name
from distflow.kubeflow.types import Runtime, RuntimeKind, RuntimeTrainer, TrainerType
from distflow.pools.model import Pool

__all__ = ["DEFAULT_RUNTIME", "PLAIN_RUNTIME", "RUNTIMES", "Framework", "runtime_in", "runtime_name"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Framework:
    """How a runtime starts the ranks of a group."""

    name: str
    """Kubeflow's name of the framework."""
    command: tuple[str, ...]
    """The program that starts the ranks, for people."""
    launcher: str | None = None
    """``launcher`` of the group."""
    framework: str | None = None
    """``framework`` of the group."""
    package: str | None = None
    """The package that its program needs."""
    has_one_rank: bool = False
    """Whether each node has one process, which uses all its GPUs."""


def _of(name: str, *command: str, package: str | None) -> Framework:
    return Framework(name=name, command=command, framework=name, package=package, has_one_rank=command == ("python3",))


DEFAULT_RUNTIME, PLAIN_RUNTIME = "torch-distributed", "custom-distributed"

RUNTIMES: Mapping[str, Framework] = MappingProxyType(
    {
        f"{one.name}-distributed": one
        for one in (
            Framework(name="torch", command=("torchrun",), launcher="torchrun", package="torch"),
            _of("deepspeed", "deepspeed", package="deepspeed"),
            _of("accelerate", "accelerate", "launch", package="accelerate"),
            _of("jax", "python3", package="jax"),
            _of("tensorflow", "python3", package="tensorflow"),
            _of("ray", "python3", package="ray"),
            _of("horovod", "horovodrun", package="horovod"),
            _of("mpi", "mpirun", package=None),
            _of("custom", "python3", package=None),
        )
    }
)
"""The framework of each runtime. The names are Kubeflow's where it has the same one."""


def runtime_name(runtime: object) -> str:
    """Return the name of a runtime of ``train``: its name, or an object of distflow or ``kubeflow``. Raises ``ValueError``."""
    if runtime is None:
        return DEFAULT_RUNTIME
    name = getattr(runtime, "name", None) if class_name(runtime, ["Runtime"]) else runtime
    if isinstance(name, str) and name in RUNTIMES:
        return name
    raise ValueError(f"there is no runtime `{name}`\n{did_you_mean(str(name), RUNTIMES, what='runtimes')}")


def runtime_in(pool: Pool, name: str) -> Runtime:
    """Return a runtime with the GPUs of a pool's nodes, as far as they are configured."""
    framework = RUNTIMES[name]
    trainer = RuntimeTrainer(trainer_type=TrainerType.CUSTOM_TRAINER, framework=framework.name, image="")
    gpus = [node.gpus for node in pool.nodes if node.gpus is not None]
    if gpus:
        trainer.device, trainer.device_count = ("gpu", str(min(gpus))) if min(gpus) else ("cpu", "1")
    trainer.set_command(framework.command)
    return Runtime(name=name, trainer=trainer, kind=RuntimeKind.CLUSTER_TRAINING_RUNTIME)
