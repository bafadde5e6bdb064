"""The runtimes: the training frameworks that distflow can start. They are a fixed table, not objects in Kubernetes."""

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
    """A training framework, and the settings with which a runtime starts the ranks of a group."""

    name: str
    """The name of the framework; Kubeflow's name, if Kubeflow supports the framework."""
    command: tuple[str, ...]
    """The program that starts the ranks. It is only shown to users."""
    launcher: str | None = None
    """The value of ``launcher`` in the spec of the group."""
    framework: str | None = None
    """The value of ``framework`` in the spec of the group."""
    package: str | None = None
    """The Python package of the framework, if it has one."""
    has_one_rank: bool = False
    """Whether each node has one rank by default, which uses all GPUs of the task."""


def _framework(name: str, *command: str, package: str | None) -> Framework:
    return Framework(name=name, command=command, framework=name, package=package, has_one_rank=command == ("python3",))


DEFAULT_RUNTIME, PLAIN_RUNTIME = "torch-distributed", "custom-distributed"

RUNTIMES: Mapping[str, Framework] = MappingProxyType(
    {
        f"{one.name}-distributed": one
        for one in (
            Framework(name="torch", command=("torchrun",), launcher="torchrun", package="torch"),
            _framework("deepspeed", "deepspeed", package="deepspeed"),
            _framework("accelerate", "accelerate", "launch", package="accelerate"),
            _framework("jax", "python3", package="jax"),
            _framework("tensorflow", "python3", package="tensorflow"),
            _framework("ray", "python3", package="ray"),
            _framework("horovod", "horovodrun", package="horovod"),
            _framework("mpi", "mpirun", package=None),
            _framework("custom", "python3", package=None),
        )
    }
)
"""The framework of each runtime. Runtimes that Kubeflow also has keep Kubeflow's names."""


def runtime_name(runtime: object) -> str:
    """Return the name of a runtime, which is given as a name or as a ``Runtime`` object. ``None`` is the default runtime.

    Raises ``ValueError`` if the runtime does not exist.
    """
    if runtime is None:
        return DEFAULT_RUNTIME
    name = getattr(runtime, "name", None) if class_name(runtime, ["Runtime"]) else runtime
    if isinstance(name, str) and name in RUNTIMES:
        return name
    raise ValueError(f"there is no runtime `{name}`\n{did_you_mean(str(name), RUNTIMES, what='runtimes')}")


def runtime_in(pool: Pool, name: str) -> Runtime:
    """Return a runtime. Its devices are the smallest number of GPUs that the pool configures for a node.

    If that number is 0, the device is one CPU. If the pool does not configure GPUs, the devices are ``Unknown``.
    """
    framework = RUNTIMES[name]
    trainer = RuntimeTrainer(trainer_type=TrainerType.CUSTOM_TRAINER, framework=framework.name, image="")
    gpus = [node.gpus for node in pool.nodes if node.gpus is not None]
    if gpus:
        trainer.device, trainer.device_count = ("gpu", str(min(gpus))) if min(gpus) else ("cpu", "1")
    trainer.set_command(framework.command)
    return Runtime(name=name, trainer=trainer, kind=RuntimeKind.CLUSTER_TRAINING_RUNTIME)
