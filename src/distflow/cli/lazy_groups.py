"""Groups of commands whose modules are imported when a command is called, and completed or listed without that."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar

import typer
from typer.core import TyperGroup

__all__ = ["LazyCommand", "LazyGroup", "commands"]


@dataclass(frozen=True, slots=True)
class LazyCommand:
    """Where a command is, and what it does in one line."""

    place: str
    """``module:attribute`` of a ``typer.Typer``."""
    help: str


def commands(table: Mapping[str, tuple[str, str]]) -> Mapping[str, LazyCommand]:
    """Return a table of commands from name → (place, help)."""
    return MappingProxyType({name: LazyCommand(*row) for name, row in table.items()})


class LazyGroup(TyperGroup):
    """A group whose commands stand in ``table``."""

    table: ClassVar[Mapping[str, LazyCommand]]

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names in the table's order."""
        return list(self.table)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Import and return a command, or ``None`` when there is none of that name."""
        entry = self.table.get(cmd_name)
        if entry is None:
            return None
        module, _, attribute = entry.place.partition(":")
        command = typer.main.get_command(getattr(importlib.import_module(module), attribute))
        command.name = cmd_name
        return command

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the table into the help, without importing anything."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, entry.help) for name, entry in self.table.items()])
