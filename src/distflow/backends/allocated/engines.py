"""Open the engine of a pool."""

from __future__ import annotations

from distflow.backends.allocated.engine import Engine
from distflow.errors import InputError
from distflow.pools.model import Pool

__all__ = ["open_engine"]


def open_engine(pool: Pool) -> Engine:
    """Return the engine that allocates the nodes of a pool, without connecting. Raises ``InputError``."""
    raise InputError(f"this version of distflow has no engine for pool {pool.name!r}")
