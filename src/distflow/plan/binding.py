"""The binding of a group: the resources leased for an attempt.

This is a separate module, so that ``state.record`` can be imported without ``plan.model``.
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct

__all__ = ["Binding", "TaskBinding"]


class TaskBinding(Struct, frozen=True, kw_only=True):
    """The resources leased for one task."""

    node: str
    address: str = ""
    """The node's address on the training network."""
    interface: str = ""
    """The network interface with that address; empty if no interface has it."""
    gpu_ids: tuple[int, ...] = ()


class Binding(Struct, frozen=True, kw_only=True):
    """The resources leased for one attempt of a group."""

    tasks: Mapping[str, TaskBinding]
    port: int | None = None
    """The rendezvous port on the master's node; ``None`` if the group has no world."""
    link_port: int | None = None
    """The port of the gang link's hub, on the node of the lead (in a world, the master); ``None`` for a group of one task."""
    leased_at: float = 0.0
    """Seconds since the epoch."""
