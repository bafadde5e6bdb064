"""``distflow top``."""

from __future__ import annotations

import json
import sys
from typing import Annotated

import typer

from distflow.cli.completion import complete_pool
from distflow.cli.context import open_client
from distflow.cli.options import Format, FormatOption, command_app
from distflow.cli.render.overview import overview_json, overview_text
from distflow.cli.render.tables import Paint, terminal_width
from distflow.client.client import now
from distflow.client.overview import read_overview
from distflow.client.workflows import pause

__all__ = ["app"]

app = command_app()

_INTERVAL_S = 2.0


@app.command(epilog="Examples: distflow top  ·  distflow top --pool lab  ·  distflow top -t json")
def top(
    pool: Annotated[
        list[str] | None,
        typer.Option("--pool", "-p", help="Only this pool; may be repeated.", autocompletion=complete_pool),
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="Print once, also on a terminal.")] = False,
    format_type: FormatOption = Format.TEXT,
) -> None:
    """Show running workflows and the GPUs of the pools, live.

    Each GPU is one bar. Its height is the utilization; a dot is a GPU that none of your tasks uses. Ctrl-C ends it.
    """
    with open_client() as client:
        if format_type is Format.JSON:
            print(json.dumps(overview_json(read_overview(client, pool or ()), now=now()), indent=2))
            return
        paint = Paint.of(sys.stdout)

        def shown() -> str:
            return overview_text(read_overview(client, pool or ()), now=now(), paint=paint, width=terminal_width(sys.stdout))

        if once or not sys.stdout.isatty():
            print(shown(), end="")
            return
        from rich.console import Console
        from rich.live import Live
        from rich.text import Text

        with Live(console=Console(file=sys.stdout), screen=True, auto_refresh=False) as live:
            while True:
                live.update(Text.from_ansi(shown(), no_wrap=True, overflow="ellipsis"), refresh=True)
                pause(_INTERVAL_S)
