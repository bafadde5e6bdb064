"""``distflow node``."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from distflow.cli.command import Format, FormatOption, HostfileOption
from distflow.cli.opening import open_client
from distflow.cli.reap import PoolOption, reap
from distflow.cli.tables import table
from distflow.cli.uninstall import uninstall
from distflow.client.nodes import Cleaned, choose_nodes, clean_nodes
from distflow.documents.printable import plain
from distflow.documents.quantities import parse_duration
from distflow.errors import InputError, NodeUnreachable

__all__ = ["app"]

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, add_completion=False)


@app.callback()
def _node() -> None:
    """Look after what distflow keeps on the nodes."""


app.command(epilog="Examples: distflow node reap --dry-run  ·  distflow node reap --pool lab --node gpu2")(reap)
app.command(epilog="Examples: distflow node uninstall --pool lab  ·  distflow node uninstall --node gpu2 --yes")(uninstall)


@app.command(epilog="Examples: distflow node clean --dry-run  ·  distflow node clean --older-than 2d")
def clean(
    pool: PoolOption = None,
    older_than: Annotated[
        str | None,
        typer.Option("--older-than", metavar="DURATION", help="Untouched for at least this long; else the pool's retention."),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be removed, remove nothing.")] = False,
    hostfile: HostfileOption = None,
    format_type: FormatOption = Format.TEXT,
) -> None:
    """Remove from the nodes what workflows left there and nobody needs: logs, outputs, files.

    Workflows that are not over are never touched. Logs that are mirrored on this machine stay.
    """
    age_s = _seconds(older_than) if older_than is not None else None
    with open_client() as client:
        nodes = choose_nodes(client, pool, hosts=client.hosts(hostfile))
        results = clean_nodes(client, nodes, older_than_s=age_s, is_dry_run=dry_run)
    _show(results, dry_run, format_type)
    failed = [result for result in results if result.error]
    if failed and format_type is Format.JSON:
        # The document has said it all.
        raise typer.Exit(NodeUnreachable.exit_code)
    if failed:
        raise NodeUnreachable(failed[0].node, failed[0].error)


def _seconds(text: str) -> float:
    try:
        return float(parse_duration(text))
    except ValueError as error:
        raise InputError(f"--older-than {text!r}: {error}", hint="for example 12h or 14d") from None


def _show(results: Sequence[Cleaned], dry_run: bool, format_type: Format) -> None:
    if format_type is Format.JSON:
        rows = [
            {"node": one.node, "removed": list(one.removed), "kept": one.kept, "freed_bytes": one.freed_bytes,
             "free_bytes": one.free_bytes, "error": one.error or None}
            for one in results
        ]  # fmt: skip
        print(json.dumps({"dry_run": dry_run, "nodes": rows}, indent=2))
        return
    text = [
        (one.node, str(len(one.removed)), str(one.kept), f"{one.freed_bytes / 2**20:.1f} MiB", plain(one.error) or "-")
        for one in results
    ]
    print(table(("Node", "Would remove" if dry_run else "Removed", "Kept", "Freed", "Error"), text), end="")
    if os.isatty(sys.stderr.fileno()) and dry_run:
        print("nothing was removed: this was a dry run", file=sys.stderr)
