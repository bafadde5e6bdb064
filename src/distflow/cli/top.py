"""``distflow top``."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Collection
from contextlib import suppress
from typing import Annotated

import typer

from distflow.cli.completion import complete_pool
from distflow.cli.context import open_client
from distflow.cli.options import Format, FormatOption, command_app
from distflow.cli.render.overview import overview_json, overview_text
from distflow.cli.render.tables import Paint, terminal_width
from distflow.client.client import Client, now
from distflow.client.nodes import Holders, ask_resource_holders
from distflow.client.overview import read_overview
from distflow.client.pools import list_nodes
from distflow.client.workflows import pause
from distflow.errors import DistflowError

__all__ = ["app"]

app = command_app()

_INTERVAL_S = 2.0
_RESPONSE_TIMEOUT_S = 10.0
"""The maximum time to wait for the responses of nodes."""
_QUERY_INTERVAL_S = 30.0


@app.command(epilog="Examples: distflow top  ·  distflow top --pool lab  ·  distflow top -t json")
def top(
    pool: Annotated[
        list[str] | None,
        typer.Option("--pool", "-p", help="Only this pool; may be repeated.", autocompletion=complete_pool),
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="Print once, also on a terminal.")] = False,
    format_type: FormatOption = Format.TEXT,
) -> None:
    """Show unfinished workflows and the GPUs of the pools, live.

    Each GPU of your tasks is one bar, whose height is the utilization. A dot is a free GPU, and `?` is a GPU whose state or
    utilization is unknown. The nodes report other uses of their GPUs: `u` is another user, and `p` is another program. A node
    that does not respond within 10 s is reported. To end the display, press Ctrl-C.
    """
    with open_client() as client:
        if format_type is Format.JSON:
            found = read_overview(client, pool or (), _read_holders(client, pool or ()))
            print(json.dumps(overview_json(found, now=now()), indent=2))
            return
        paint = Paint.of(sys.stdout)
        answers: dict[tuple[str, str], Holders] = {}

        def render() -> str:
            found = read_overview(client, pool or (), answers)
            return overview_text(found, now=now(), paint=paint, width=terminal_width(sys.stdout))

        if once or not sys.stdout.isatty():
            answers = _read_holders(client, pool or ())
            print(render(), end="")
            return
        thread = _HolderThread(pool or ())
        from rich.console import Console
        from rich.live import Live
        from rich.text import Text

        with Live(console=Console(file=sys.stdout), screen=True, auto_refresh=False) as live:
            while True:
                answers = thread.answers
                live.update(Text.from_ansi(render(), no_wrap=True, overflow="ellipsis"), refresh=True)
                pause(_INTERVAL_S)


def _read_holders(client: Client, pools: Collection[str]) -> dict[tuple[str, str], Holders]:
    """Return the holders of resources, as the nodes of the pools report them, by pool and node."""
    rows = list_nodes(client, [*pools], all_pools=not pools)
    holders = ask_resource_holders([(row.pool, row.node) for row in rows], within_s=_RESPONSE_TIMEOUT_S)
    return {(row.pool.name, row.node.name): one for row, one in zip(rows, holders, strict=True)}


class _HolderThread:
    """Queries the nodes at intervals in a thread. The display therefore never waits for them."""

    def __init__(self, pools: Collection[str]) -> None:
        self.answers: dict[tuple[str, str], Holders] = {}
        self._pools = pools
        threading.Thread(target=self._run, name="query nodes", daemon=True).start()

    def _run(self) -> None:
        with open_client() as client:
            while True:
                with suppress(DistflowError):  # the display reports the same error
                    self.answers = _read_holders(client, self._pools)
                pause(_QUERY_INTERVAL_S)
