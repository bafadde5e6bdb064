"""Votes of all ranks and small exchanged values. Without a process group, a rank uses only its own value."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

from distflow.train.world import control_group

__all__ = ["all_ranks", "any_rank", "channel", "check_votes_allowed", "from_all", "from_first", "without_votes"]

_Value = TypeVar("_Value")
_refused = ""
"""The reason why votes are refused now, or an empty string."""


@contextmanager
def without_votes(why: str) -> Iterator[None]:
    """Refuse votes in this context, because they would wait for ranks that have left the loop."""
    global _refused  # noqa: PLW0603 (a process is in one world)
    before, _refused = _refused, why
    try:
        yield
    finally:
        _refused = before


def check_votes_allowed() -> None:
    """Raise ``RuntimeError`` inside ``without_votes``, where some ranks may have left the loop."""
    if _refused:
        raise RuntimeError(_refused)


def channel(group: dist.ProcessGroup | None = None) -> tuple[dist.ProcessGroup | None, torch.device]:
    """Return the group for small tensors of all ranks, and the device for these tensors.

    The default is the control group, or torch's default group if the program has not called ``init``. Raises
    ``RuntimeError`` inside ``without_votes``.
    """
    check_votes_allowed()
    group = group or control_group()
    if dist.is_initialized() and "gloo" not in dist.get_backend_config(group):
        return group, torch.device("cuda", torch.cuda.current_device())
    return group, torch.device("cpu")


def any_rank(answer: bool, *, group: dist.ProcessGroup | None = None) -> bool:
    """Return whether the answer of at least one rank is true. Collective."""
    return not all_ranks(not answer, group=group)


def all_ranks(answer: bool, *, group: dist.ProcessGroup | None = None, timeout: timedelta | None = None) -> bool:
    """Return whether the answers of all ranks are true. Collective.

    Raises ``RuntimeError`` inside ``without_votes``, and if a rank does not vote within ``timeout`` (default: the group's).
    """
    if not dist.is_initialized():
        return answer
    group, device = channel(group)
    ballot = torch.tensor([int(answer)], dtype=torch.int32, device=device)
    work = dist.all_reduce(ballot, dist.ReduceOp.MIN, group=group, async_op=True)
    if work is not None:
        work.wait(*(() if timeout is None else (timeout,)))
    return bool(ballot.item())


def from_first(value: _Value, group: dist.ProcessGroup | None = None) -> _Value:
    """Return rank 0's value on every rank. Collective; the value must be picklable."""
    if not dist.is_initialized():
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0, group=group, device=None if group is None else torch.device("cpu"))
    return box[0]


def from_all(value: _Value, group: dist.ProcessGroup | None = None) -> list[_Value]:
    """Return the values of all ranks, ordered by rank. Collective; the values must be picklable."""
    if not dist.is_initialized():
        return [value]
    values: list[_Value] = [value] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values
