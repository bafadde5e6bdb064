"""``from distflow import distributed``: the calls of ``valohai.distributed``, such as ``distributed.me()`` and ``.rank``.

The names are those of ``distflow.train.distributed.Distributed``, for the gang of this process's task.
"""

from __future__ import annotations

from typing import Any

from distflow.train.distributed import distributed as _gang


def __getattr__(name: str) -> Any:
    if name.startswith("_"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(_gang, name)
