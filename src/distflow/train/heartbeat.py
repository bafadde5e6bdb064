"""The heartbeat of the training loop: it stops when the loop hangs."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path

__all__ = ["beat"]

_EVERY_S = 1.0
_last = -_EVERY_S


def beat() -> None:
    """Touch the file that ``DISTFLOW_HEARTBEAT`` names, at most once a second; without the variable, do nothing.

    Call it once per step from the training loop, not from a thread: a thread would continue while the loop hangs. A failure to
    touch the file is ignored.
    """
    global _last  # noqa: PLW0603 (one file per process)
    path = os.environ.get("DISTFLOW_HEARTBEAT")
    now = time.monotonic()
    if not path or now - _last < _EVERY_S:
        return
    _last = now
    with suppress(OSError):
        Path(path).touch()
