"""Options that several commands share, and the ``Typer`` of a single command."""

from __future__ import annotations

from enum import Enum
from typing import Annotated, Any

import typer

__all__ = ["Format", "FormatOption", "HostfileOption", "NodesOption", "PoolOption", "command_app"]


class Format(str, Enum):
    """The format of results on standard output."""

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

PoolOption = Annotated[str | None, typer.Option("--pool", "-p", help="Only this pool; else all of the configuration.")]
NodesOption = Annotated[
    list[str] | None, typer.Option("--node", "-n", help="Only this node; may be given several times.", show_default=False)
]


def command_app(**settings: Any) -> typer.Typer:
    """Return the ``Typer`` of a single command, with plain help and without completion options."""
    return typer.Typer(rich_markup_mode=None, add_completion=False, pretty_exceptions_enable=False, **settings)
