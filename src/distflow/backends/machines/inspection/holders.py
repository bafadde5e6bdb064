"""Asking a node who holds what of it."""

from __future__ import annotations

from dataclasses import dataclass

from distflow.backends.machines.backend import transport_of
from distflow.backends.machines.connection.bootstrap import connect
from distflow.errors import DistflowError
from distflow.pools.model import Node, Pool

__all__ = ["Holder", "Holders", "ask_holders"]

_LIMIT_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """An attempt, of any user, that holds something."""

    user: str
    attempt: str
    """``<workflow uuid>/<group>/<task>/<n>``; whoever it is may have written something else."""
    label: str = ""
    """``<workflow id>/<task>``; empty where the lease does not name them."""
    pid: int | None
    """Of the agent that leased it."""
    gpus: tuple[int, ...] = ()
    ports: tuple[int, ...] = ()
    cpus: int = 0
    memory: int = 0
    """Bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Holders:
    """What one node said, or why it could not be asked."""

    holders: tuple[Holder, ...] = ()
    foreign: tuple[tuple[int, str], ...] = ()
    """GPUs on which somebody else computes, and who."""
    error: str = ""


def ask_holders(pool: Pool, node: Node) -> Holders:
    """Ask one node. One that cannot be reached is an error in the answer, not an exception."""
    transport = transport_of(pool, node)
    try:
        link = connect(transport, node.root, node.python, timeout_s=pool.connect_timeout_s)
        try:
            said = link.request("holders", lease_dir=node.lease_dir, timeout_s=_LIMIT_S)
        finally:
            link.close()
    except DistflowError as error:
        return Holders(error=error.message)
    finally:
        transport.close()
    return Holders(
        holders=tuple(Holder(**{**one, "gpus": tuple(one["gpus"]), "ports": tuple(one["ports"])}) for one in said["holders"]),
        foreign=tuple((int(one["gpu"]), str(one["words"])) for one in said["foreign"]),
    )
