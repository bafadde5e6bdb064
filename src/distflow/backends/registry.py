"""Names of backends, and the modules that hold them, imported on use."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from distflow.backends.base import Backend, LogSink, Sink
from distflow.pools.model import Pool

__all__ = ["BACKENDS", "open_backend"]

BACKENDS: Mapping[str, str] = MappingProxyType({"local": "distflow.backends.machines.backend"})
"""Backend → module with ``open_backend(pool, blobs, sink, logs)``."""


def open_backend(pool: Pool, *, blobs: Path, sink: Sink, logs: LogSink) -> Backend:
    """Return the backend of a pool. ``blobs`` holds the files that specs send, by digest."""
    module = importlib.import_module(BACKENDS[pool.backend])
    backend: Backend = module.open_backend(pool, blobs=blobs, sink=sink, logs=logs)
    return backend
