"""Parts of command definitions: groups that import their commands late, single commands, and common options."""

from __future__ import annotations

import gc
import importlib
from collections.abc import Mapping
from enum import Enum
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, NamedTuple

import typer
from typer.core import TyperGroup

from distflow.errors import InputError

__all__ = [
    "ConnectTimeoutOption",
    "Format",
    "FormatOption",
    "HostfileOption",
    "LazyCommand",
    "LazyGroup",
    "NodesOption",
    "PoolOption",
    "command_app",
    "commands",
]


class Format(str, Enum):
    """The format of results on standard output."""

    TEXT = "text"
    JSON = "json"


FormatOption = Annotated[
    Format, typer.Option("--format-type", "-t", help="Print text for people, or one JSON document for programs.")
]

HostfileOption = Annotated[
    str | None,
    typer.Option(
        "--hostfile",
        metavar="FILE",
        envvar="DISTFLOW_HOSTFILE",
        help="Use the machines in this file over SSH. Each line is like `gpu1 slots=8`.",
    ),
]

PoolOption = Annotated[str | None, typer.Option("--pool", "-p", help="Only this pool. Default: all pools.")]
NodesOption = Annotated[
    list[str] | None, typer.Option("--node", "-n", help="Only this node; may be repeated.", show_default=False)
]

ConnectTimeoutOption = Annotated[
    int, typer.Option("--connect-timeout", metavar="SECONDS", min=1, help="The maximum time for the node to respond.")
]


class _App(typer.Typer):
    """A ``Typer`` whose help pages show each example on a line of its own."""

    def command(self, name: str | None = None, *, epilog: str | None = None, **settings: Any) -> Any:
        """Declare a command. The parts of ``epilog`` are separated by ``·``."""
        if epilog is not None:
            epilog = "\b\n" + epilog.replace(": ", ":\n  ", 1).replace("  ·  ", "\n  ")
        return super().command(name, epilog=epilog, **settings)


def command_app(**settings: Any) -> typer.Typer:
    """Return a ``Typer`` for one command or a group of commands, with plain help and without completion options."""
    return _App(rich_markup_mode=None, add_completion=False, pretty_exceptions_enable=False, **settings)


class LazyCommand(NamedTuple):
    """The location of a command and its one-line help."""

    place: str
    """``module:attribute`` of a ``typer.Typer``."""
    help: str


def commands(table: Mapping[str, tuple[str, str]]) -> Mapping[str, LazyCommand]:
    """Return a table of commands from a mapping of name to (place, help)."""
    return MappingProxyType({name: LazyCommand(*row) for name, row in table.items()})


class LazyGroup(TyperGroup):
    """A command group that finds its commands in ``table``."""

    table: ClassVar[Mapping[str, LazyCommand]]

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names of the commands, in the order of the table."""
        return list(self.table)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Import and return a command, or return ``None`` if it does not exist."""
        entry = self.table.get(cmd_name)
        if entry is None:
            return None
        module, _, attribute = entry.place.partition(":")
        command = typer.main.get_command(getattr(importlib.import_module(module), attribute))
        command.name = cmd_name
        if not isinstance(command, TyperGroup) and not gc.isenabled():
            # ``entry`` disabled it. All modules of the command are imported now.
            gc.freeze()
            gc.enable()
        return command

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the command that the arguments begin with. Raise ``InputError`` with similar names if it does not exist."""
        name, known = args[0], self.list_commands(ctx)
        is_command = name in known or name.startswith("-") or self.get_command(ctx, name) is not None
        if not is_command and not ctx.resilient_parsing:
            from distflow.documents.text import did_you_mean

            hint = did_you_mean(name, known, what="commands")
            raise InputError(f"`{ctx.command_path} {name}` is not a command", hint=hint)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the commands to the help page without importing their modules."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, entry.help) for name, entry in self.table.items()])
