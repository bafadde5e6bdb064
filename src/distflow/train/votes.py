"""Small questions that all ranks answer together; without a process group a rank answers for itself."""

from __future__ import annotations

import torch
import torch.distributed as dist

__all__ = ["all_ranks", "any_rank", "home_device"]


def home_device() -> torch.device:
    """Return the device on which small tensors travel: the CPU where the group can, else the current GPU."""
    if dist.is_initialized() and "gloo" not in dist.get_backend_config():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def any_rank(answer: bool, *, group: dist.ProcessGroup | None = None) -> bool:
    """Tell whether at least one rank says yes. Collective."""
    return _vote(answer, dist.ReduceOp.MAX, group)


def all_ranks(answer: bool, *, group: dist.ProcessGroup | None = None) -> bool:
    """Tell whether every rank says yes. Collective."""
    return _vote(answer, dist.ReduceOp.MIN, group)


def _vote(answer: bool, operation: dist.ReduceOp.RedOpType, group: dist.ProcessGroup | None) -> bool:
    if not dist.is_initialized():
        return answer
    ballot = torch.tensor([int(answer)], dtype=torch.int32, device=home_device())
    dist.all_reduce(ballot, operation, group=group)
    return bool(ballot.item())
