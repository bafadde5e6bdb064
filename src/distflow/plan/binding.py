"""What was leased for an attempt of a group. Apart from the plan, because records hold it and must be quick to import."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct

__all__ = ["Binding", "TaskBinding"]


class TaskBinding(Struct, frozen=True, kw_only=True):
    """What was leased for one task."""

    node: str
    address: str = ""
    """Of the node on the training network."""
    interface: str = ""
    gpu_ids: tuple[int, ...] = ()


class Binding(Struct, frozen=True, kw_only=True):
    """What was leased for one attempt of a group."""

    tasks: Mapping[str, TaskBinding]
    port: int | None = None
    """The rendezvous port, held on the master's node; ``None`` when the group has no world."""
    link_port: int | None = None
    """Where the gang link's hub listens, on the master's node; ``None`` when there is one task only."""
    leased_at: float = 0.0
    """Seconds since the epoch."""
