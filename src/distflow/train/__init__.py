"""The library for training scripts, and the launcher of their processes.

Of distflow's other packages, it imports only ``distflow.protocol``, so that both packages can be copied to other machines.
Public names are loaded on first use, so that the launcher never imports torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # for type checkers and editors
    from distflow.train.checkpoints.checkpoints import CheckpointError as CheckpointError
    from distflow.train.checkpoints.checkpoints import Checkpoints as Checkpoints
    from distflow.train.communication.gradients import all_reduce_mean as all_reduce_mean
    from distflow.train.heartbeat import beat as beat
    from distflow.train.launcher.starting import launch as launch
    from distflow.train.loading.batching import BatchSizes as BatchSizes
    from distflow.train.loading.batching import DynamicBatcher as DynamicBatcher
    from distflow.train.loading.batching import balanced_split as balanced_split
    from distflow.train.loading.batching import batch_sizes as batch_sizes
    from distflow.train.loading.batching import equal_batches as equal_batches
    from distflow.train.loading.batching import join as join
    from distflow.train.loading.loader import EpochSampler as EpochSampler
    from distflow.train.loading.loader import Loader as Loader
    from distflow.train.metrics import Pace as Pace
    from distflow.train.metrics import StepTimer as StepTimer
    from distflow.train.metrics import report as report
    from distflow.train.parallel import ParallelPlan as ParallelPlan
    from distflow.train.safeguards import STOPPED as STOPPED
    from distflow.train.safeguards import GradientGuard as GradientGuard
    from distflow.train.safeguards import MemoryGuard as MemoryGuard
    from distflow.train.safeguards import NonFiniteGradients as NonFiniteGradients
    from distflow.train.safeguards import OutOfMemory as OutOfMemory
    from distflow.train.safeguards import listen_for_stop as listen_for_stop
    from distflow.train.safeguards import stop_requested as stop_requested
    from distflow.train.strategies.description import Strategy as Strategy
    from distflow.train.strategies.options import DDP as DDP
    from distflow.train.strategies.options import FSDP as FSDP
    from distflow.train.strategies.options import HybridParallel as HybridParallel
    from distflow.train.strategies.options import NotParallel as NotParallel
    from distflow.train.strategies.options import PipelineParallel as PipelineParallel
    from distflow.train.strategies.options import StrategyOptions as StrategyOptions
    from distflow.train.strategies.options import TensorParallel as TensorParallel
    from distflow.train.world import World as World
    from distflow.train.world import WorldError as WorldError
    from distflow.train.world import finish as finish
    from distflow.train.world import init as init

_NAMES = {
    "checkpoints.checkpoints": "CheckpointError Checkpoints",
    "communication.gradients": "all_reduce_mean",
    "deprecated": "Worker accumulate backward clip_gradients compress_gradients current_strategy data_shard evaluate "
    "full_state_dict local_sgd parallelize",
    "heartbeat": "beat",
    "launcher.starting": "launch",
    "loading.batching": "BatchSizes DynamicBatcher balanced_split batch_sizes equal_batches join",
    "loading.loader": "EpochSampler Loader",
    "metrics": "Pace StepTimer report",
    "parallel": "ParallelPlan",
    "safeguards": "GradientGuard MemoryGuard NonFiniteGradients OutOfMemory STOPPED listen_for_stop stop_requested",
    "strategies.description": "Strategy",
    "strategies.options": "DDP FSDP HybridParallel NotParallel PipelineParallel StrategyOptions TensorParallel",
    "world": "World WorldError finish init",
}
"""Modules of this package, and the public names that each provides."""
_MODULES = {name: module for module, names in _NAMES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    """Load a public name. Raises ``AttributeError`` for other names."""
    module = _MODULES.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{module}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES})
