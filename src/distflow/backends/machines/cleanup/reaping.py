"""Killing leftover processes of earlier attempts on nodes."""

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
    """A process or a container of an ended attempt."""

    pid: int | None
    """``None`` for a container."""
    name: str
    attempt: str
    """``<workflow uuid>/<group>/<task>/<n>``."""
    why: str
    """Why it is a leftover."""
    is_ours: bool
    """Whether it is killed. Leftovers of another root or another user are only reported."""
    user: str = ""
    age_s: float | None = None
    gpus: tuple[int, ...] = ()
    """GPUs on which it runs, as far as ``nvidia-smi`` reports them."""
    error: str = ""
    """Why it still exists."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reaped:
    """The leftovers on one node, or why it could not be checked."""

    node: str
    found: tuple[Leftover, ...] = ()
    settled: tuple[str, ...] = ()
    """Attempts without runner and keeper whose end was recorded now."""
    error: str = ""


def reap_node(pool: Pool, node: Node, *, is_dry_run: bool) -> Reaped:
    """Kill every leftover on a node, and check again. With ``is_dry_run``, only report them.

    If the node is unreachable, the result contains an error; no exception is raised.
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
    # Leftovers that were found only after killing others are reported as well.
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
