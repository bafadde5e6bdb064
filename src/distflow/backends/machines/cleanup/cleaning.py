"""Removing from nodes what ended long ago."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

from distflow.backends.machines.backend import transport_of
from distflow.backends.machines.connection.bootstrap import connect
from distflow.backends.machines.connection.link import AgentLink
from distflow.errors import AgentError, DistflowError
from distflow.pools.model import Node, Pool

__all__ = ["Cleaned", "clean_node"]

_PATIENCE_S = 3600.0
"""For looking at millions of files, or removing them; a node that is gone is noticed by its silence, long before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cleaned:
    """What was done on one node, or why nothing was."""

    node: str
    removed: tuple[str, ...] = ()
    """uuids of workflows."""
    kept: int = 0
    """Workflows that are too young, or that still run."""
    freed_bytes: int = 0
    free_bytes: int | None = None
    """Left on the node's disk."""
    error: str = ""
    """What kept it from all or from some of that."""


def clean_node(
    pool: Pool,
    node: Node,
    *,
    older_than_s: float,
    unfinished: Collection[str],
    is_dry_run: bool,
    progress: Callable[[str], None] = lambda _: None,
) -> Cleaned:
    """Remove every workflow's directory on a node that nothing runs in and nothing was written to for ``older_than_s``.

    The clock that dates the node's files tells ages. ``unfinished`` (uuids) are never touched. A node that cannot be reached is
    an error in the answer, not an exception.
    """
    transport = transport_of(pool, node)
    try:
        link = connect(transport, node.root, node.python, timeout_s=pool.connect_timeout_s)
    except DistflowError as error:
        return Cleaned(node=node.name, error=error.message)
    try:
        survey = link.request("survey", timeout_s=_PATIENCE_S)
        old = [
            item
            for item in survey["workflows"]
            if item["uuid"] not in unfinished and not item["alive"] and survey["now"] - item["modified_at"] >= older_than_s
        ]
        freed, removed, refused = 0, [], []
        for item in old:
            uuid = item["uuid"]
            progress(f"{node.name}: {uuid}")
            try:
                freed += item["bytes"] if is_dry_run else _clean(link, uuid)
            except AgentError as error:
                refused.append(f"{uuid}: {error.detail}")
            else:
                removed.append(uuid)
        return Cleaned(
            node=node.name,
            removed=tuple(removed),
            kept=len(survey["workflows"]) - len(removed),
            freed_bytes=freed,
            free_bytes=survey.get("free_bytes"),
            error="; ".join(refused),
        )
    except DistflowError as error:
        return Cleaned(node=node.name, error=error.message)
    finally:
        link.close()
        transport.close()


def _clean(link: AgentLink, uuid: str) -> int:
    return int(link.request("clean", timeout_s=_PATIENCE_S, workflow=uuid)["freed_bytes"])
