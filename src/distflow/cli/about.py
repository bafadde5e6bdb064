"""``distflow schema`` and ``version``."""

from __future__ import annotations

import json
import sys
from enum import Enum
from typing import Annotated

import typer

from distflow import __version__
from distflow.cli.options import Format, FormatOption, command_app
from distflow.errors import InputError

__all__ = ["schema_app", "version_app"]


schema_app = command_app()


class _Output(str, Enum):
    QUERY = "query"
    LIST = "list"
    SUBMIT = "submit"
    EVENTS = "events"
    OUTPUTS = "outputs"
    WHY = "why"
    POOL_CHECK = "pool-check"
    NOTIFICATION = "notification"


@schema_app.command(epilog="Examples: distflow schema > workflow.schema.json  ·  distflow schema --output query")
def schema(
    config: Annotated[bool, typer.Option("--config", help="Print the schema of the configuration, distflow.yaml.")] = False,
    output: Annotated[
        _Output | None,
        typer.Option("--output", help="Print the schema of the JSON output of the named command, or of notifications."),
    ] = None,
) -> None:
    """Print the JSON Schema of workflow specs, for editors and other tools."""
    from distflow.client import specs  # imported here because `version` does not need it

    if config and output is not None:
        raise InputError("--config and --output cannot be combined", hint="give one of them")
    if output is not None:
        print(specs.output_schema_text(output.value))
    else:
        sys.stdout.write(specs.configuration_schema_text() if config else specs.schema_text())


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
