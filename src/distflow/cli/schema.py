"""``distflow schema``."""

from __future__ import annotations

import sys

from distflow.cli.options import command_app
from distflow.client.submitting.specs import schema_text

__all__ = ["app"]

app = command_app()


@app.command(epilog="Example: distflow schema > workflow.schema.json")
def schema() -> None:
    """Print the JSON Schema of workflow specs, for editors and other tools."""
    sys.stdout.write(schema_text())
