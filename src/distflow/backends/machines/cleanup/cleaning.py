"""Removing old workflows from nodes."""

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
"""Timeout for listing or removing millions of files. A dead node is detected by its silence, long before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cleaned:
    """The removed workflows of one node, or why none was removed."""

    node: str
    removed: tuple[str, ...] = ()
    """uuids of workflows."""
    kept: int = 0
    """Number of workflows that are too young or still running."""
    freed_bytes: int = 0
    free_bytes: int | None = None
    """Free bytes on the node's disk."""
    error: str = ""
    """Why workflows could not be removed."""


def clean_node(
    pool: Pool,
    node: Node,
    *,
    older_than_s: float,
    unfinished: Collection[str],
    is_dry_run: bool,
    progress: Callable[[str], None] = lambda _: None,
) -> Cleaned:
    """Remove the directories of all workflows on a node that are not running and were not written to for ``older_than_s``.

    Ages are measured with the clock of the node's file system. ``unfinished`` workflows (uuids) are never removed. If the node
    is unreachable, the result contains an error; no exception is raised.
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
