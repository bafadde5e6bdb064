"""What the commands share: their ``Typer`` and the options that mean the same everywhere."""

from __future__ import annotations

from enum import Enum
from typing import Annotated, Any

import typer

__all__ = ["Format", "FormatOption", "HostfileOption", "command_app"]


class Format(str, Enum):
    """How results are written to standard output."""

    TEXT = "text"
    JSON = "json"


FormatOption = Annotated[Format, typer.Option("--format-type", "-t", help="text for people, json for programs (one document).")]

HostfileOption = Annotated[
    str | None,
    typer.Option(
        "--hostfile",
        metavar="FILE",
        envvar="DISTFLOW_HOSTFILE",
        help="Take the machines from this file (`gpu1 slots=8` in each line), reached over SSH.",
    ),
]


def command_app(**settings: Any) -> typer.Typer:
    """Return the ``Typer`` of one command: plain help, no completion options of its own."""
    return typer.Typer(rich_markup_mode=None, add_completion=False, pretty_exceptions_enable=False, **settings)
