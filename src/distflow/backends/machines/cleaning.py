"""Removing from nodes what ended long ago."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

from distflow.backends.machines.backend import transport_of
from distflow.backends.machines.bootstrap import connect
from distflow.errors import DistflowError
from distflow.pools.model import Node, Pool

__all__ = ["Cleaned", "clean_node"]


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


def clean_node(
    pool: Pool,
    node: Node,
    *,
    older_than_s: float,
    unfinished: Collection[str],
    now: float,
    is_dry_run: bool,
    progress: Callable[[str], None] = lambda _: None,
) -> Cleaned:
    """Remove every workflow's directory on a node that nothing runs in and nothing was written to for ``older_than_s``.

    ``unfinished`` (uuids) are never touched. A node that cannot be reached is an error in the answer, not an exception.
    """
    transport = transport_of(pool, node)
    try:
        link = connect(transport, node.root, node.python, timeout_s=pool.connect_timeout_s)
    except DistflowError as error:
        return Cleaned(node=node.name, error=error.message)
    try:
        survey = link.request("survey")
        old = [
            item
            for item in survey["workflows"]
            if item["uuid"] not in unfinished and not item["alive"] and now - item["modified_at"] >= older_than_s
        ]
        freed = 0
        for item in old:
            progress(f"{node.name}: {item['uuid']}")
            freed += item["bytes"] if is_dry_run else link.request("clean", workflow=item["uuid"])["freed_bytes"]
        return Cleaned(
            node=node.name,
            removed=tuple(item["uuid"] for item in old),
            kept=len(survey["workflows"]) - len(old),
            freed_bytes=freed,
            free_bytes=survey.get("free_bytes"),
        )
    except DistflowError as error:
        return Cleaned(node=node.name, error=error.message)
    finally:
        link.close()
        transport.close()
