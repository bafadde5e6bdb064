"""A hook for DDP's gradients.

DDP wants a hook's parameters to be named as here, and their types not to be text: this module does without ``__future__``.
"""

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket

__all__ = ["in_bfloat16"]


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
