"""``distflow node uninstall``."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from distflow.cli.command import Format, FormatOption, HostfileOption
from distflow.cli.opening import open_client
from distflow.cli.reap import NodesOption, PoolOption
from distflow.client.nodes import PoolNode, Uninstalled, choose_nodes, uninstall_nodes
from distflow.documents.printable import plain
from distflow.errors import InputError, NodeError

__all__ = ["uninstall"]


def uninstall(
    pool: PoolOption = None,
    nodes: NodesOption = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask first.")] = False,
    hostfile: HostfileOption = None,
    format_type: FormatOption = Format.TEXT,
) -> None:
    """Remove distflow from the nodes, with all that its tasks left there: outputs, logs, files, locks.

    Refused on a node where a task lives. What is in its root and not distflow's stays, and is named.
    """
    with open_client() as client:
        chosen = choose_nodes(client, pool, hosts=client.hosts(hostfile), names=nodes)
        if not yes:
            _ask(chosen)
        results = uninstall_nodes(client, chosen)
    if format_type is Format.JSON:
        rows = [
            {"node": one.node, "removed": list(one.removed), "left": list(one.left), "error": one.error or None}
            for one in results
        ]
        print(json.dumps({"nodes": rows}, indent=2))
    else:
        _show(results)
    failed = [one for one in results if one.error]
    if failed and format_type is Format.JSON:
        # The document has said it all.
        raise typer.Exit(NodeError.exit_code)
    if failed:
        raise NodeError(failed[0].node, failed[0].error.removeprefix(f"{failed[0].node}: "))


def _ask(nodes: Sequence[PoolNode]) -> None:
    names = ", ".join(f"{node.name} ({node.root})" for _, node in nodes)
    if not sys.stdin.isatty():
        raise InputError(f"this removes what tasks left on {names}", hint="add --yes when that is meant")
    print(f"this removes distflow and all that its tasks left, outputs too, from: {names}", file=sys.stderr)
    print("go on? [y/N] ", end="", file=sys.stderr, flush=True)
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        print("nothing was removed", file=sys.stderr)
        raise typer.Exit(0)


def _show(results: Sequence[Uninstalled]) -> None:
    for one in results:
        if one.error:
            continue
        print(f"{one.node}: {'removed' if one.removed else 'nothing was there'}{', but for:' if one.left else ''}")
        for left in one.left:
            print(f"  {plain(left)}")
