"""The node's clock: the one place of the runtime that reads it."""

from __future__ import annotations

import time

__all__ = ["now"]


def now() -> float:
    """Seconds since the epoch on this node. Deadlines use ``time.monotonic`` instead: this clock may be set."""
    return time.time()  # noqa: TID251 - the runtime has no Clock to be given: it is what the node's clock says
