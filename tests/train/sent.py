"""A counter of a rank's collectives and of their bytes, which torch's ``CommDebugMode`` does not count."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["CollectiveCounter"]

_NAMES = {
    "allreduce_": "all_reduce",
    "_allgather_base_": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
}


class CollectiveCounter(TorchDispatchMode):
    """Counts the calls and the bytes of the collectives that DDP and FSDP start inside the context."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d" and (name := _NAMES.get(func.overloadpacket.__name__)) is not None:
            self.calls[name] += 1
            sent = [args[0]] if isinstance(args[0], torch.Tensor) else args[0]  # a tensor would yield all its elements
            self.bytes[name] += sum(one.nbytes for one in sent)
        return func(*args, **(kwargs or {}))
