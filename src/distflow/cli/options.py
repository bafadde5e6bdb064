"""Building blocks of commands: groups that import a command only when it is called, single commands, and common options."""

from __future__ import annotations

import gc
import importlib
import sys
from collections.abc import Mapping
from enum import Enum
from itertools import groupby
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, NamedTuple

import typer
from typer.core import TyperCommand, TyperGroup

from distflow.cli.completion import Completion, complete_node, complete_pool, complete_task
from distflow.errors import InputError

__all__ = [
    "ALIASES",
    "AttemptOption",
    "CheckFormat",
    "CheckFormatOption",
    "ConnectTimeoutOption",
    "Format",
    "FormatOption",
    "HelpCommand",
    "HostfileOption",
    "LazyCommand",
    "LazyGroup",
    "NodesOption",
    "OsmoTasksOption",
    "PoolOption",
    "RegexOption",
    "ResumeOption",
    "TasksOption",
    "command_app",
    "commands",
    "pool_check_command",
]


ALIASES = MappingProxyType({"status": "query", "stop": "cancel"})
"""Commands of ``distflow workflow`` by their other names."""


class Format(str, Enum):
    """The format of results on standard output."""

    TEXT = "text"
    JSON = "json"


FormatOption = Annotated[
    Format, typer.Option("--format-type", "-t", help="Print text for people, or one JSON document for programs.")
]


class CheckFormat(str, Enum):
    """The format of the results of commands that check specs."""

    TEXT = "text"
    JSON = "json"
    GITHUB = "github"

    @property
    def result_format(self) -> Format:
        """The format of the results: text for ``github``, whose annotations are printed in addition."""
        return Format.JSON if self is CheckFormat.JSON else Format.TEXT


CheckFormatOption = Annotated[
    CheckFormat,
    typer.Option(
        "--format-type",
        "-t",
        help="Print text, one JSON document for programs, or text with annotations and a job summary for GitHub Actions.",
    ),
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


def pool_check_command(pool: str, node: str | None = None, *, hostfile: str | None = None) -> str:
    """Return the command that checks a pool, or one of its nodes. ``hostfile`` is the value of ``HostfileOption``."""
    import shlex

    options = (("--pool", pool), ("--hostfile", hostfile), ("--node", node))
    return shlex.join(["distflow", "pool", "check", *(word for name, value in options if value for word in (name, value))])


PoolOption = Annotated[
    str | None,
    typer.Option("--pool", "-p", help="Only this pool. Default: all pools, or the hostfile.", autocompletion=complete_pool),
]
NodesOption = Annotated[
    list[str] | None,
    typer.Option("--node", "-n", help="Only this node; may be repeated.", show_default=False, autocompletion=complete_node),
]

TasksOption = Annotated[
    list[str] | None, typer.Option("--task", help="Only this task; may be repeated.", autocompletion=complete_task)
]
OsmoTasksOption = Annotated[
    list[str] | None, typer.Option("--task", "-t", help="Only this task; may be repeated.", autocompletion=complete_task)
]
"""``TasksOption`` with OSMO's short name, for ``logs`` and ``events``. In other commands, ``-t`` is the format."""

AttemptOption = Annotated[
    int | None,
    typer.Option(
        "--retry-id", "-r", min=0, help="Only this attempt, counted from 0. Default: the last one.", show_default=False
    ),
]

RegexOption = Annotated[
    str, typer.Option("--regex", "-x", metavar="REGEX", help="Only files whose relative path matches from its start.")
]
ResumeOption = Annotated[bool, typer.Option("--resume", "-r", help="Skip files that exist with the right content.")]

ConnectTimeoutOption = Annotated[
    int, typer.Option("--connect-timeout", metavar="SECONDS", min=1, help="The maximum time for the node to respond.")
]


class HelpCommand(TyperCommand):
    """A command whose help page has colors on a terminal."""

    def get_help(self, ctx: Any) -> str:
        """Return the help page, with colors on a terminal."""
        return _colored(super().get_help(ctx))


class _HelpGroup(TyperGroup):
    def get_help(self, ctx: Any) -> str:
        """Return the help page, with colors on a terminal."""
        return _colored(super().get_help(ctx))


def _colored(page: str) -> str:
    """Return a help page with bold headings and colored names if standard output is a terminal with colors."""
    if not sys.stdout.isatty():
        return page
    import re

    from distflow.cli.render.tables import Paint

    paint = Paint.of(sys.stdout)
    page = re.sub(r"^(\S.*:)$|^(Usage:)", lambda found: paint.strong(found[0]), page, flags=re.MULTILINE)
    return re.sub(r"^  (\S+(?: \S+)*)(?=  )", lambda found: "  " + paint.name(found[1]), page, flags=re.MULTILINE)


class _App(typer.Typer):
    """A ``Typer`` whose help pages show each example on a line of its own."""

    def command(self, name: str | None = None, *, epilog: str | None = None, **settings: Any) -> Any:
        """Declare a command. The parts of ``epilog`` are separated by ``·``."""
        if epilog is not None:
            epilog = "\b\n" + epilog.replace(": ", ":\n  ", 1).replace("  ·  ", "\n  ")
        return super().command(name, epilog=epilog, **{"cls": HelpCommand, **settings})


def command_app(**settings: Any) -> typer.Typer:
    """Return a ``Typer`` for one command or a group of commands, without completion options."""
    return _App(cls=_HelpGroup, rich_markup_mode=None, add_completion=False, pretty_exceptions_enable=False, **settings)


class LazyCommand(NamedTuple):
    """The location of a command and its one-line help."""

    target: str
    """``module:attribute`` of a ``typer.Typer``."""
    help: str
    section: str
    """The heading above the command on the help page of its group."""


def commands(sections: Mapping[str, Mapping[str, tuple[str, str]]]) -> Mapping[str, LazyCommand]:
    """Return a table of commands from the sections of the help page, each a mapping of name to (target, help)."""
    return MappingProxyType(
        {name: LazyCommand(*row, section) for section, table in sections.items() for name, row in table.items()}
    )


class LazyGroup(_HelpGroup):
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
        module, _, attribute = entry.target.partition(":")
        command = typer.main.get_command(getattr(importlib.import_module(module), attribute))
        command.name = cmd_name
        if not isinstance(command, TyperGroup) and not gc.isenabled():
            # ``cli/entry.py`` disabled the garbage collector until the module of the command is imported.
            gc.freeze()
            gc.enable()
        return command

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the command at the start of the arguments. Raise ``InputError`` with a similar name if it does not exist."""
        name, known = args[0], self.list_commands(ctx)
        is_command = name in known or name.startswith("-") or self.get_command(ctx, name) is not None
        if not is_command and not ctx.resilient_parsing:
            from distflow.documents.text import most_similar

            near = most_similar(name, known)
            hint = f"{f'did you mean `{near}`? ' if near else ''}all commands: {ctx.command_path} --help"
            raise InputError(f"`{ctx.command_path} {name}` is not a command", hint=hint)
        return super().resolve_command(ctx, args)

    def shell_complete(self, ctx: Any, incomplete: str) -> Any:
        """Return the commands or options that begin with a text, without importing the modules of the commands."""
        if incomplete and not incomplete[0].isalnum():
            return super().shell_complete(ctx, incomplete)
        names = [name for name in self.list_commands(ctx) if name.startswith(incomplete)]
        return [Completion(name, self.table[name].help if name in self.table else "") for name in names]

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the commands to the help page, by section, without importing their modules."""
        width = max(map(len, self.table))
        for section, entries in groupby(self.table.items(), key=lambda item: item[1].section):
            with formatter.section(section):
                formatter.write_dl([(f"{name:{width}}", entry.help) for name, entry in entries])
