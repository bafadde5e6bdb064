"""``distflow schema`` and ``version``."""

from __future__ import annotations

import json
import sys
from typing import Annotated

import typer

from distflow import __version__
from distflow.cli.options import Format, FormatOption, command_app

__all__ = ["schema_app", "version_app"]


schema_app = command_app()


@schema_app.command(epilog="Example: distflow schema > workflow.schema.json")
def schema(
    config: Annotated[bool, typer.Option("--config", help="Print the schema of the configuration, distflow.yaml.")] = False,
) -> None:
    """Print the JSON Schema of workflow specs, for editors and other tools."""
    from distflow.client.specs import configuration_schema_text, schema_text  # `version` does not need it

    sys.stdout.write(configuration_schema_text() if config else schema_text())


version_app = command_app()


@version_app.command()
def version(
    format_type: FormatOption = Format.TEXT,
) -> None:
    """Print distflow's version."""
    major, minor, revision = __version__.split(".")[:3]
    if format_type is Format.JSON:
        print(json.dumps({"client": {"major": major, "minor": minor, "revision": revision}}, indent=2))
    else:
        print(f"distflow {__version__}")
