"""What a training script imports, and what starts its processes: the only place with torch.

Imports nothing of the rest of distflow, so that it can be copied to machines that have no distflow. Names are loaded when
they are used: importing this package costs nothing, and the launcher never imports torch.
"""

from __future__ import annotations

import importlib
from typing import Any

_MODULES = {
    "STOPPED": "stopping",
    "BatchSizes": "data",
    "CheckpointError": "checkpoint",
    "Checkpoints": "checkpoint",
    "DynamicBatcher": "batching",
    "EpochSampler": "loader",
    "GradientGuard": "safeguards",
    "Loader": "loader",
    "MemoryGuard": "safeguards",
    "NonFiniteGradients": "safeguards",
    "OutOfMemory": "safeguards",
    "Pace": "metrics",
    "StepTimer": "metrics",
    "World": "world",
    "WorldError": "world",
    "balanced_split": "data",
    "batch_sizes": "data",
    "beat": "heartbeat",
    "equal_batches": "batching",
    "finish": "world",
    "init": "world",
    "join": "data",
    "launch": "starting",
    "listen_for_stop": "stopping",
    "report": "metrics",
    "stop_requested": "stopping",
}
"""Public name -> the module of this package that defines it."""


def __getattr__(name: str) -> Any:
    """Load a public name. Raises ``AttributeError`` for any other, as a module does."""
    module = _MODULES.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{module}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES})
