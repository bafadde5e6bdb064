"""Asking the nodes of a gang whether it can run, before anything is started."""

from __future__ import annotations

import sys
from collections.abc import Collection

import typer

from distflow.cli.tables import Paint
from distflow.errors import NodeError
from distflow.pools.model import Pool

__all__ = ["check_nodes"]


def check_nodes(pool: Pool, names: Collection[str]) -> None:
    """Check nodes as ``pool check`` does; say on standard error what was found.

    Raises ``typer.Exit`` with the code of a node that refuses when a gang cannot run on them.
    """
    from distflow.cli.bottom import Bottom
    from distflow.cli.checks import findings_text
    from distflow.client.pools import check_pool_nodes

    bottom = Bottom(sys.stderr)
    try:
        found = check_pool_nodes(pool, names, on_progress=lambda text: bottom.show(f"checking: {text} …")).verdict
    finally:
        bottom.clear()
    paint = Paint.of(sys.stderr)
    for line in findings_text(found, paint):
        print(line, file=sys.stderr)
    if not found.can_run:
        print(
            f"{paint.bad(found.text)}\nnothing was started; all of it: distflow pool check --pool {pool.name}", file=sys.stderr
        )
        raise typer.Exit(NodeError.exit_code)
