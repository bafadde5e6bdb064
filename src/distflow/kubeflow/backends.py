"""The backend configurations of ``TrainerClient``, and the pool that each of them selects.

Kubeflow's configurations are accepted, too. ``LocalProcessBackendConfig`` and ``ContainerBackendConfig`` select this machine.
``KubernetesBackendConfig`` selects the default pool.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

__all__ = [
    "ContainerBackendConfig",
    "KubernetesBackendConfig",
    "LocalProcessBackendConfig",
    "PoolChoice",
    "SSHBackendConfig",
    "class_name",
    "pool_choice",
]

_log = logging.getLogger("distflow")
_LOCAL_POOL = "local"


@dataclass
class SSHBackendConfig:
    """Jobs run in a pool of any backend, or on the given machines over SSH. Kubeflow does not have this configuration.

    Args:
        pool: The name of a pool in distflow's configuration. Default: the default pool.
        hosts: Machines to use instead of the nodes of the pool: the path of a hostfile, or its lines, such as
            ``["gpu1 slots=8", "gpu2 slots=8"]``.
        python: The Python interpreter on the machines. Default: the pool's.

    """

    pool: str | None = None
    hosts: str | os.PathLike[str] | Sequence[str] | None = None
    python: str | None = None


@dataclass(kw_only=True)
class LocalProcessBackendConfig:
    """Jobs run as processes on this machine, in the pool ``local``. ``cleanup_venv`` has no effect."""

    cleanup_venv: bool = True


@dataclass(kw_only=True)
class ContainerBackendConfig:
    """Jobs run on this machine, in the pool ``local``. The fields have no effect; ``docs/containers.md`` has the settings."""

    pull_policy: str = "IfNotPresent"
    auto_remove: bool = True
    container_host: str | None = None
    container_runtime: str | None = None
    runtime_source: Any = None
    dataset_initializer_image: str = "ghcr.io/kubeflow/trainer/dataset-initializer:latest"
    model_initializer_image: str = "ghcr.io/kubeflow/trainer/model-initializer:latest"
    initializer_timeout: int = 600


@dataclass(kw_only=True)
class KubernetesBackendConfig:
    """Jobs run in the default pool. The settings of a cluster belong to a pool, so a field that is set is an error."""

    namespace: str | None = None
    config_file: str | None = None
    context: str | None = None
    client_configuration: Any = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolChoice:
    """The pool or the hosts of a client, and the Python interpreter there."""

    pool: str | None = None
    hosts: str | os.PathLike[str] | Sequence[str] | None = None
    python: str | None = None


def pool_choice(config: object | None) -> PoolChoice:
    """Return the pool that a configuration of distflow or of the package ``kubeflow`` selects. Raises ``ValueError``."""
    if config is None:
        return PoolChoice()
    name = class_name(config, (*_CONFIGS,))
    if name == "SSHBackendConfig":
        return PoolChoice(**vars(config))
    if name == "KubernetesBackendConfig":
        keys = [one.name for one in fields(KubernetesBackendConfig) if getattr(config, one.name, None) is not None]
        if keys:
            raise ValueError(
                f"KubernetesBackendConfig({keys[0]}=…) is not supported, because distflow reads the settings of a cluster "
                "from a pool: add a pool with `backend: kubernetes` to the configuration, and choose it with "
                "SSHBackendConfig(pool=…)"
            )
        return PoolChoice()
    if name == "ContainerBackendConfig":
        _log.warning(
            "jobs run in the pool `local`, whose tasks run in containers only if the pool sets `container` and the job has an "
            "image (docs/containers.md)"
        )
        return PoolChoice(pool=_LOCAL_POOL)
    if name == "LocalProcessBackendConfig":
        return PoolChoice(pool=_LOCAL_POOL)
    raise ValueError(f"`{config!r}` is not a backend configuration: use one of {', '.join(_CONFIGS)}")


_CONFIGS = ("SSHBackendConfig", "LocalProcessBackendConfig", "ContainerBackendConfig", "KubernetesBackendConfig")


def class_name(value: object, known: Sequence[str]) -> str | None:
    """Return the name of the ``known`` class that a value is an instance of; ``None`` if there is none.

    Classes are compared by name, because those of the package ``kubeflow`` have the same names and fields as distflow's.
    """
    return next((kind.__name__ for kind in type(value).__mro__ if kind.__name__ in known), None)
