"""Hooks for DDP's gradients.

DDP wants a hook's parameters to be named as here, and their types not to be text: this module does without ``__future__``.
"""

import torch
import torch.distributed as dist
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager

__all__ = ["in_bfloat16", "until_apart"]


def in_bfloat16(state: dist.ProcessGroup, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket of gradients over the ranks, sent as bfloat16; on every backend, unlike torch's own hook."""
    gradients = bucket.buffer()
    sent = gradients.to(torch.bfloat16).div_(state.size())
    work = dist.all_reduce(sent, group=state, async_op=True)

    def received(done: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
        received_bytes: torch.Tensor = done.value()[0]
        return gradients.copy_(received_bytes)

    future: torch.futures.Future[torch.Tensor] = work.get_future().then(received)
    return future


def until_apart(state: tuple[PeriodicModelAverager, int], bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average gradients over the ranks in the first steps, and leave them as they are from then on.

    Unlike torch's own hook it asks the averager which step it is: so both continue together after a checkpoint was loaded.
    """
    averager, warmup_steps = state
    if averager.step < warmup_steps:
        return default_hooks.allreduce_hook(averager.process_group, bucket)
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future
