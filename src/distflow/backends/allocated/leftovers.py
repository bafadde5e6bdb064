"""Allocations that ended workflows have left."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import closing

from distflow.backends.allocated.engines import open_engine
from distflow.backends.machines.cleanup import Leftover, Reaped
from distflow.errors import DistflowError
from distflow.pools.model import Pool

__all__ = ["reap_allocations"]


def reap_allocations(pool: Pool, *, ended: Collection[str], unfinished: Collection[str], is_dry_run: bool) -> Reaped:
    """Release the allocations of ended workflows (uuids). Those of other submitters are only reported.

    The result has the name of the pool as its node. An error of the engine is part of it, and is not raised.
    """
    found: list[Leftover] = []
    try:
        with closing(open_engine(pool)) as engine:
            for name, one in engine.allocations().items():
                if one.workflow in unfinished:
                    continue
                is_ours = one.workflow in ended
                why = (
                    "its workflow has ended"
                    if is_ours
                    else "submitted with another state directory, perhaps on another machine"
                )
                attempt = f"{one.workflow}/{one.group}/{one.attempt}"
                found.append(Leftover(pid=None, name=f"job {name}", attempt=attempt, why=why, is_ours=is_ours))
                if is_ours and not is_dry_run:
                    engine.release([name])
    except DistflowError as error:
        return Reaped(node=pool.name, found=tuple(found), error=error.message)
    return Reaped(node=pool.name, found=tuple(found))
