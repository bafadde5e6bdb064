"""What distflow keeps on nodes, and who uses them: asked of many nodes at once, each of which may fail for itself."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TypeVar

from distflow.backends.machines.cleanup.cleaning import Cleaned, clean_node
from distflow.backends.machines.cleanup.reaping import Leftover, Reaped, reap_node
from distflow.backends.machines.cleanup.uninstalling import Uninstalled, uninstall_node
from distflow.backends.machines.inspection.holders import Holder, Holders, ask_holders
from distflow.client.client import Client
from distflow.errors import NotFound
from distflow.pools.choose import choose_pool
from distflow.pools.hostfile import Host
from distflow.pools.model import Node, Pool
from distflow.runtime.leases.holder_names import folded

__all__ = [
    "Cleaned",
    "Holder",
    "Holders",
    "Leftover",
    "PoolNode",
    "Reaped",
    "Uninstalled",
    "ask_nodes",
    "ask_resource_holders",
    "choose_nodes",
    "clean_nodes",
    "folded",
    "reap_nodes",
    "replace_uuids",
    "uninstall_nodes",
]

PoolNode = tuple[Pool, Node]
T = TypeVar("T")

_AT_ONCE = 32
# Not within a path, which must stay as it is.
_KNOWN_BY_UUID = re.compile(
    r"(?<![\w/.-])([0-9a-f]{8}(-?)[0-9a-f]{4}(?:\2[0-9a-f]{4}){2}\2[0-9a-f]{12})(?:/[A-Za-z0-9_-]+/([A-Za-z0-9_-]+)/([0-9]+))?(?![\w/-])"
)


def choose_nodes(
    client: Client, pool: str | None = None, *, hosts: Sequence[Host] | None = None, names: Sequence[str] | None = None
) -> list[PoolNode]:
    """Return nodes, each with its pool: of one pool or of hosts, else of all pools; ``names``: only those.

    Raises ``NotFound`` and ``ProblemsFound``.
    """
    configuration = client.configuration()
    given = pool is not None or hosts is not None
    pools = [choose_pool(configuration, given=pool, hosts=hosts)] if given else list(configuration.pools.values())
    nodes = [(one, node) for one in pools for node in one.nodes]
    for name in names or ():
        if all(node.name != name for _, node in nodes):
            known = ", ".join(sorted({node.name for _, node in nodes}))
            raise NotFound(f"there is no node {name!r}", hint=f"nodes: {known}")
    return [one for one in nodes if not names or one[1].name in names]


def ask_nodes(nodes: Sequence[PoolNode], ask: Callable[[Pool, Node], T]) -> list[T]:
    """Ask every node, many at once, and return the answers in the order of the nodes."""
    with ThreadPoolExecutor(max_workers=_AT_ONCE) as workers:
        return list(workers.map(lambda one: ask(*one), nodes))


def reap_nodes(nodes: Sequence[PoolNode], *, is_dry_run: bool = False) -> list[Reaped]:
    """Find processes and containers of attempts that nothing watches any more, and stop them unless ``is_dry_run``.

    Each node's answer has its errors, and names workflows by their uuids (see ``replace_uuids``).
    """
    return ask_nodes(nodes, lambda pool, node: reap_node(pool, node, is_dry_run=is_dry_run))


def clean_nodes(
    client: Client, nodes: Sequence[PoolNode], *, older_than_s: float | None = None, is_dry_run: bool = False
) -> list[Cleaned]:
    """Remove from nodes what ended workflows left there: logs, outputs, files.

    Args:
        client: Whose unfinished workflows are not touched.
        nodes: Where.
        older_than_s: Only what was not touched for so long; else the pool's retention.
        is_dry_run: Whether to remove nothing.

    """
    client.writable_directory()
    unfinished, ids = client.store.uuids(are_unfinished=True), client.store.ids()
    results = ask_nodes(
        nodes,
        lambda pool, node: clean_node(
            pool,
            node,
            older_than_s=pool.retention_s if older_than_s is None else older_than_s,
            unfinished=unfinished,
            is_dry_run=is_dry_run,
        ),
    )
    return [replace(one, error=replace_uuids(one.error, ids)) for one in results]


def uninstall_nodes(client: Client, nodes: Sequence[PoolNode]) -> list[Uninstalled]:
    """Remove distflow from nodes, with all that its tasks left there; refused by a node on which a task is alive."""
    ids = client.store.ids()
    return [replace(one, error=replace_uuids(one.error, ids)) for one in ask_nodes(nodes, uninstall_node)]


def ask_resource_holders(nodes: Sequence[PoolNode]) -> list[Holders]:
    """Ask nodes which attempts of all users hold GPUs, CPUs, memory and ports there, and who else computes on a GPU."""
    return ask_nodes(nodes, ask_holders)


def replace_uuids(text: str, ids: Mapping[str, str]) -> str:
    """Return a text of a node with ids of workflows in place of their uuids, and names of tasks in place of attempts.

    >>> replace_uuids("7278eb5c7278eb5c7278eb5c7278eb5c/g/w1/2 runs", {"7278eb5c7278eb5c7278eb5c7278eb5c": "spin-1"})
    'spin-1/w1 retry-2 runs'
    """

    def name(match: re.Match[str]) -> str:
        uuid, _, task, attempt = match.groups()
        if task is None:
            return ids.get(uuid, "an unknown workflow")
        retry = f" retry-{attempt}" if int(attempt) else ""
        return f"{ids[uuid]}/{task}{retry}" if uuid in ids else f"{task}{retry} of an unknown workflow"

    return _KNOWN_BY_UUID.sub(name, text)
