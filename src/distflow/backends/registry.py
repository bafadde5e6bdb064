"""The names of backends and their modules, which are imported on use."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from distflow.errors import InputError
from distflow.transports.ssh import load_ssh

if TYPE_CHECKING:
    from distflow.backends.base import Backend, LogSink, Sink
    from distflow.pools.model import Pool

__all__ = ["BACKENDS", "WITHOUT_LASTING_FILES", "open_backend", "preload", "require_supported", "unknown_hosts"]

BACKENDS: Mapping[str, str] = MappingProxyType(
    {
        "local": "distflow.backends.machines.backend",
        "ssh": "distflow.backends.machines.backend",
        "slurm": "distflow.backends.allocated.backend",
        "kubernetes": "distflow.backends.allocated.backend",
        "ray": "distflow.backends.allocated.backend",
    }
)
"""Backend → module with ``open_backend(pool, blobs, sink, logs)``."""
WITHOUT_LASTING_FILES = frozenset({"kubernetes"})
"""Backends whose nodes, and the files on them, do not outlast the tasks."""


def preload(names: Iterable[str]) -> None:
    """Import the modules of these backends, and the SSH library if one of them may use it. Unknown names are ignored."""
    for name in names:
        if name in BACKENDS:
            importlib.import_module(BACKENDS[name])
        if name in ("ssh", "slurm", "ray"):
            load_ssh()


def require_supported(pool: Pool) -> None:
    """Raise ``InputError`` if the pool's backend is unknown, lacks a package, or does not run on this operating system."""
    if pool.backend not in BACKENDS:
        message = f"pool `{pool.name}` has `backend: {pool.backend}`, which this version of distflow does not have"
        raise InputError(message, hint=f"available: {', '.join(BACKENDS)}")
    if pool.backend == "kubernetes" and importlib.util.find_spec("kubernetes") is None:
        raise InputError(
            f"pool `{pool.name}` needs the package `kubernetes`, which is not installed",
            hint="run: pip install 'distflow-cli[kubernetes]'",
        )
    if pool.backend == "local" and sys.platform != "linux":
        raise InputError(
            f"pool `{pool.name}` runs tasks on this machine, and distflow can run tasks only on Linux",
            hint="run them on Linux machines over SSH: --hostfile FILE, or a pool with `backend: ssh`",
        )


def unknown_hosts(pool: Pool) -> Mapping[str, str]:
    """Return the host names that cannot be resolved, by node; empty if the backend is not ``ssh``. Takes at most about 2 s."""
    if pool.backend != "ssh":
        return {}
    from distflow.backends.machines.connection import destination  # noqa: PLC0415  only a hostfile needs it

    return destination.unknown_hosts(pool)


def open_backend(pool: Pool, *, blobs: Path, sink: Sink, logs: LogSink) -> Backend:
    """Return the backend of a pool. ``blobs`` holds files of specs and collected outputs, by digest.

    Raises ``InputError`` as ``require_supported`` does.
    """
    require_supported(pool)
    module = importlib.import_module(BACKENDS[pool.backend])
    backend: Backend = module.open_backend(pool, blobs=blobs, sink=sink, logs=logs)
    return backend
