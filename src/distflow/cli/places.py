"""What the verbs of ``distflow node`` share: which nodes are meant, and asking many of them at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, TypeVar

import typer

from distflow.cli import wiring
from distflow.errors import NotFound
from distflow.pools.choose import choose_pool
from distflow.pools.model import Node, Pool

__all__ = ["NodesOption", "Place", "PoolOption", "chosen_places", "each_place"]

Place = tuple[Pool, Node]
T = TypeVar("T")

PoolOption = Annotated[str | None, typer.Option("--pool", "-p", help="Only this pool; else all of the configuration.")]
NodesOption = Annotated[
    list[str] | None, typer.Option("--node", "-n", help="Only this node; may be given several times.", show_default=False)
]

_AT_ONCE = 32


def chosen_places(pool: str | None, hostfile: str | None, nodes: Sequence[str] | None = None) -> list[Place]:
    """Return the nodes that are meant, each with its pool. Raises ``NotFound`` and ``ProblemsFound``."""
    configuration, hosts = wiring.configuration(), wiring.hosts(hostfile)
    given = pool is not None or hosts is not None
    pools = [choose_pool(configuration, given=pool, hosts=hosts)] if given else list(configuration.pools.values())
    places = [(one, node) for one in pools for node in one.nodes]
    for name in nodes or ():
        if all(node.name != name for _, node in places):
            known = ", ".join(sorted({node.name for _, node in places}))
            raise NotFound(f"there is no node {name!r}", hint=f"nodes: {known}")
    return [place for place in places if not nodes or place[1].name in nodes]


def each_place(places: Sequence[Place], ask: Callable[[Pool, Node], T]) -> list[T]:
    """Ask every node, many at once, and return the answers in the order of the nodes."""
    with ThreadPoolExecutor(max_workers=_AT_ONCE) as workers:
        return list(workers.map(lambda place: ask(*place), places))
