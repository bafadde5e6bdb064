"""``distflow version``."""

from __future__ import annotations

import json

from distflow import __version__
from distflow.cli.options import Format, FormatOption, command_app

__all__ = ["app"]

app = command_app()


@app.command()
def version(
    format_type: FormatOption = Format.TEXT,
) -> None:
    """Print distflow's version."""
    major, minor, revision = __version__.split(".")[:3]
    if format_type is Format.JSON:
        print(json.dumps({"client": {"major": major, "minor": minor, "revision": revision}}, indent=2))
    else:
        print(f"distflow {__version__}")
