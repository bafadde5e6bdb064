"""Ending what earlier attempts left on nodes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from distflow.backends.machines.backend import transport_of
from distflow.backends.machines.connection.bootstrap import connect
from distflow.errors import DistflowError
from distflow.pools.model import Node, Pool

__all__ = ["Leftover", "Reaped", "reap_node"]

_LIMIT_S = 180.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Leftover:
    """A process, or a container, of an attempt that is over."""

    pid: int | None
    """``None`` of a container."""
    name: str
    attempt: str
    """``<workflow uuid>/<group>/<task>/<n>``."""
    why: str
    """What makes it a leftover."""
    is_ours: bool
    """Whether it is ended; what belongs to another root or another user is only named."""
    user: str = ""
    age_s: float | None = None
    gpus: tuple[int, ...] = ()
    """On which it computes, as far as ``nvidia-smi`` knows."""
    error: str = ""
    """Why it is still there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reaped:
    """What was found on one node, or why nobody could look."""

    node: str
    found: tuple[Leftover, ...] = ()
    settled: tuple[str, ...] = ()
    """Attempts that nobody watched, whose end was now recorded."""
    error: str = ""


def reap_node(pool: Pool, node: Node, *, is_dry_run: bool) -> Reaped:
    """End every leftover on a node, and look again; with ``is_dry_run``, only look.

    A node that cannot be reached is an error in the answer, not an exception.
    """
    transport = transport_of(pool, node)
    try:
        link = connect(transport, node.root, node.python, timeout_s=pool.connect_timeout_s)
    except DistflowError as error:
        return Reaped(node=node.name, error=error.message)
    try:
        answer = link.request("reap", dry_run=is_dry_run, timeout_s=_LIMIT_S)
    except DistflowError as error:
        return Reaped(node=node.name, error=error.message)
    finally:
        link.close()
        transport.close()
    left = {one["pid"]: one for one in answer["left"]}
    # What came to light only while the others were ended is told as well.
    processes = {one["pid"]: one for one in answer["processes"]} | left
    found = [_process(one, answer["message"] if one["pid"] in left else "") for one in processes.values()]
    return Reaped(
        node=node.name,
        found=(*found, *(_container(one) for one in answer["containers"])),
        settled=tuple(answer["settled"]),
    )


def _process(one: Mapping[str, Any], error: str) -> Leftover:
    return Leftover(
        pid=one["pid"],
        name=one["name"],
        attempt=one["attempt"],
        why=one["why"],
        is_ours=one["is_ours"],
        user=one["user"],
        age_s=one["age_s"],
        gpus=tuple(one["gpus"]),
        error=error,
    )


def _container(one: Mapping[str, Any]) -> Leftover:
    return Leftover(
        pid=None,
        name=f"{one['program']} {one['name']}",
        attempt=one["attempt"],
        why=one["why"],
        is_ours=one["is_ours"],
        error=one.get("error") or "",
    )
