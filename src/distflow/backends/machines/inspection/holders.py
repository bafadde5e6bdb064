"""Queries for the holders of a node's resources."""

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
    """An attempt, of any user, that holds a lease."""

    user: str
    attempt: str
    """``<workflow uuid>/<group>/<task>/<n>``, unless its user wrote something else."""
    label: str = ""
    """``<workflow id>/<task>``; empty if the lease does not contain them."""
    pid: int | None
    """Process id of the agent that leased it."""
    gpus: tuple[int, ...] = ()
    ports: tuple[int, ...] = ()
    cpus: int = 0
    memory: int = 0
    """Bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Holders:
    """A node's answer, or why it could not be asked."""

    holders: tuple[Holder, ...] = ()
    foreign: tuple[tuple[int, str], ...] = ()
    """GPUs with processes that distflow did not start, and descriptions of these."""
    error: str = ""


def ask_holders(pool: Pool, node: Node) -> Holders:
    """Query one node. If it is unreachable, the result contains an error; no exception is raised."""
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
