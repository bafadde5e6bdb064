"""The OSMO pages of docs/ cover every key, command and option of OSMO, and every row of their tables has an answer."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import typer

from distflow.cli.app import app
from language import osmo_keys

DOCS = Path(__file__).resolve().parents[2] / "docs"
TEXT = "\n".join((DOCS / name).read_text(encoding="utf-8") for name in ("osmo.md", "osmo-commands.md"))
ANSWERS = ("**the same**", "**differs**: ", "**does not apply**: ", "**not yet**")
OWN = (
    "workflow why", "workflow diagnose", "workflow stacks", "workflow metrics", "workflow adopt", "workflow outputs",
    "workflow fetch", "workflow report", "workflow export", "ui", "top", "pool check", "node clean",
    "node reap", "node uninstall", "schema", "profile unset", "train advise", "train bench", "submit", "status",
    "logs", "list", "validate", "stop", "fetch", "run", "init", "notify list", "notify test",
)  # fmt: skip
"""Commands that OSMO does not have."""
GROUPS_WITH_ONE_ROW = ("dataset",)
"""Groups of commands with one row for the whole group."""

_SEARCH = "--count --offset --order --status --user --all-users --pool --priority --format-type"
OSMO: Mapping[str, str] = MappingProxyType(
    {
        "workflow submit": "--set --set-string --set-env --dry-run --pool --priority --label --rsync --format-type",
        "workflow restart": "--pool --format-type",
        "workflow validate": "--set --set-string --pool --label",
        "workflow logs": "--task --retry-id --error -n",
        "workflow events": "--task --retry-id",
        "workflow cancel": "--message --force --format-type",
        "workflow query": "--verbose --format-type",
        "workflow list": f"{_SEARCH} --name --submitted-after --submitted-before --tags --label --no-label --app",
        "workflow tag": "--workflow --add --remove",
        "workflow exec": "--group --entry --connect-timeout --keep-alive",
        "workflow spec": "--template",
        "workflow port-forward": "--port --host --udp --connect-timeout",
        "workflow rsync upload": (
            "--timeout --upload-rate-limit --poll-interval --debounce-delay --reconcile-interval --max-log-size --verbose"
            " --daemon --no-progress"
        ),
        "workflow rsync download": "--timeout --no-progress",
        "workflow rsync status": "",
        "workflow rsync stop": "",
        "task list": (
            f"{_SEARCH} --workflow-id --node --started-after --started-before --verbose --summary --aggregate-by-workflow"
        ),
        "pool list": "--pool --mode --format-type",
        "resource list": "--pool --platform --all --mode --format-type",
        "resource info": "--pool --platform",
        "credential set": "--type --payload --payload-file --format-type",
        "credential list": "--format-type",
        "credential delete": "--format-type",
        "data upload": "--regex --processes --threads --benchmark-out",
        "data download": "--regex --processes --threads --benchmark-out --resume",
        "data list": "--regex --prefix --recursive --no-pager",
        "data delete": "--regex",
        "data check": "--access-type --config-file",
        "dataset": "",
        "version": "--format-type",
        "profile set": "",
        "profile list": "--format-type",
        **dict.fromkeys(("login", "logout", "token", "user", "config", "app"), ""),
    }
)
"""OSMO's commands with their options."""


def rows() -> Iterator[tuple[str, ...]]:
    """Yield the rows of the tables, without their headings."""
    for table in re.findall(r"(?:^\|.*\n)+", TEXT, re.MULTILINE):
        for line in table.splitlines()[2:]:
            yield tuple(cell.strip() for cell in line.strip().strip("|").split(" | "))


def text_about(verb: str) -> str:
    """Return the text of all rows about a command."""
    return " ".join(" ".join(row) for row in rows() if f"`{verb}`" in row[0])


def commands() -> dict[str, set[str]]:
    """Return every command of distflow with its long options. Options without a long name have their short names."""
    found: dict[str, set[str]] = {}

    def visit(command: Any, name: str) -> None:
        if hasattr(command, "get_command"):
            context = command.context_class(command)
            for inner in command.list_commands(context):
                visit(command.get_command(context, inner), f"{name} {inner}".strip())
            return
        options = set()
        for parameter in command.params:
            names = [one for one in (*parameter.opts, *parameter.secondary_opts) if one.startswith("-")]
            options |= {one for one in names if one.startswith("--")} or set(names)
        found[name] = options - {"--help"}

    visit(typer.main.get_command(app), "")
    return found


def test_every_row_has_an_answer() -> None:
    for row in rows():
        assert all(row), row
        if re.fullmatch(r"Q\d+", row[0]):
            assert len(row) == 3, row
        else:
            assert len(row) == 2, row
            assert row[1].startswith(ANSWERS), row


def test_every_oddity_of_osmo_has_a_row() -> None:
    assert [row[0] for row in rows() if row[0][0] == "Q"] == [f"Q{number}" for number in range(1, 28)]


def test_every_key_of_osmos_language_has_a_row() -> None:
    named = {name for row in rows() for name in re.findall(r"`([^`]+)`", row[0])}
    assert sorted(osmo_keys() - named) == []


@pytest.mark.parametrize("verb", sorted(OSMO))
def test_every_option_of_osmos_commands_is_in_the_row_of_its_command(verb: str) -> None:
    text = text_about(verb)
    assert text, f"the page has no row for `{verb}`"
    assert [option for option in OSMO[verb].split() if f"`{option}`" not in text] == []


def test_every_option_of_distflows_commands_is_in_the_row_of_its_command() -> None:
    missing = [
        f"{verb} {option}"
        for verb, options in commands().items()
        if verb not in OWN and not verb.startswith(GROUPS_WITH_ONE_ROW)
        for option in sorted(options)
        if f"`{option}`" not in text_about(verb)
    ]
    assert missing == []


def test_every_command_that_only_distflow_has_is_named() -> None:
    assert [verb for verb in OWN if f"`{verb}`" not in TEXT] == []
    assert sorted(set(commands()) - {*OSMO, *OWN} - {verb for verb in commands() if verb.startswith(GROUPS_WITH_ONE_ROW)}) == []
