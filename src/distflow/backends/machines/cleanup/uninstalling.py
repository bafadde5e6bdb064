"""Removing distflow from nodes."""

from __future__ import annotations

from dataclasses import dataclass

from distflow.backends.machines.backend import transport_of
from distflow.backends.machines.connection.bootstrap import connect
from distflow.errors import DistflowError
from distflow.pools.model import Node, Pool

__all__ = ["Uninstalled", "uninstall_node"]

_LIMIT_S = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Uninstalled:
    """The removed and the remaining paths of one node."""

    node: str
    removed: tuple[str, ...] = ()
    """Removed paths."""
    left: tuple[str, ...] = ()
    """Remaining paths, each with the cause."""
    error: str = ""
    """Why nothing was removed."""


def uninstall_node(pool: Pool, node: Node) -> Uninstalled:
    """Remove distflow from a node without running tasks. Errors are in the result, and never raised."""
    transport = transport_of(pool, node)
    try:
        link = connect(transport, node.root, node.python, timeout_s=pool.connect_timeout_s)
    except DistflowError as error:
        return Uninstalled(node=node.name, error=error.message)
    try:
        answer = link.request("uninstall", lease_dir=node.lease_dir, timeout_s=_LIMIT_S)
    except DistflowError as error:
        return Uninstalled(node=node.name, error=error.message)
    finally:
        link.close()
        transport.close()
    return Uninstalled(node=node.name, removed=tuple(answer["removed"]), left=tuple(answer["left"]))
