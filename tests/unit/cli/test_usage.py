"""Options and help pages of all commands, and errors of the parser."""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Iterator
from textwrap import dedent
from typing import Any

import pytest
import typer

from distflow.cli.app import app, run
from unit.cli.screen import Terminal

OSMO: dict[str, dict[str, set[str]]] = {
    "-a": {
        "--add": {"workflow tag"},
        "--all": {"resource list"},
        "--all-users": {"workflow list", "task list"},
        "--access-type": {"data check"},
    },
    "-f": {"--force": {"workflow cancel"}, "--offset": {"workflow list", "task list"}},
    "-m": {"--message": {"workflow cancel"}, "--mode": {"pool list", "resource list"}},
    "-n": {"-n": {"workflow logs"}, "--name": {"workflow list"}},
    "-p": {"--prefix": {"data list"}, "--processes": {"data upload", "data download"}},
    "-r": {"--remove": {"workflow tag"}, "--recursive": {"data list"}, "--resume": {"data download", "dataset download"}},
    "-t": {"--task": {"workflow logs", "workflow events"}},
    "-w": {"--workflow": {"workflow tag"}, "--workflow-id": {"task list"}},
}
"""Short options that have another meaning in commands of OSMO, with these commands. `dataset` is like `data`."""

OWN = {"-o": {"--output": {"workflow report"}}}
"""Short options with the meaning that they have in most programs."""

MEANINGS = {
    "-S": "--summary", "-T": "--threads", "-W": "--aggregate-by-workflow", "-a": "", "-b": "--benchmark-out", "-c": "--count",
    "-d": "--detach", "-f": "--follow", "-g": "--group", "-k": "--key", "-m": "", "-n": "--node", "-o": "--order",
    "-p": "--pool", "-pl": "--platform", "-r": "--retry-id", "-s": "--status", "-t": "--format-type", "-u": "--user",
    "-v": "--verbose", "-w": "--wait", "-x": "--regex", "-y": "--yes",
}  # fmt: skip
"""The meaning of every short option in all other commands."""


def every_command(command: Any = None, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Yield all commands and groups with their names. Shortcuts have no entry of their own."""
    command = command or typer.main.get_command(app)
    yield " ".join(path), command
    for name in getattr(command, "table", getattr(command, "commands", {})):
        yield from every_command(command.get_command(None, name), (*path, name))


def test_a_short_option_has_one_meaning_except_where_osmo_has_others() -> None:
    found: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for name, command in every_command():
        for parameter in command.get_params(command.context_class(command)):
            for short in parameter.opts:
                if parameter.param_type_name == "option" and not short.startswith("--"):
                    found[short][max(parameter.opts, key=len)].add(name)
    assert sorted(found) == sorted(MEANINGS)
    for short, uses in found.items():
        exceptions = OSMO.get(short, {}) | OWN.get(short, {})
        assert {long: uses.pop(long) for long in exceptions} == exceptions, short
        assert list(uses) == [MEANINGS[short]] * bool(MEANINGS[short]), (short, uses)


ERRORS = {
    "workflow submit x.yaml --prioirty HIGH": """
        `--prioirty` is not an option of `distflow workflow submit`
        did you mean `--priority`? details: distflow workflow submit --help""",
    "list -q": """
        `-q` is not an option of `distflow workflow list`
        details: distflow workflow list --help""",
    "status": """
        distflow workflow query: `ID` is missing
        ID: The id or uuid of the workflow, its name for the latest run, or - for the latest workflow
        details: distflow workflow query --help""",
    "train advise --params 7b --gpus 8": """
        distflow train advise: `--gpu-memory` is missing
        --gpu-memory: The memory of one GPU, such as 80Gi
        details: distflow train advise --help""",
    "list --count": """
        distflow workflow list: `--count` needs a value
        details: distflow workflow list --help""",
    "status digits-1 --watch=yes": """
        distflow workflow query: `--watch` takes no value
        details: distflow workflow query --help""",
    "list -c x": """
        distflow workflow list: `--count`: `x` is not a whole number of at least 1
        details: distflow workflow list --help""",
    "data upload file:///x a -T 999": """
        distflow data upload: `--threads`: `999` is not a whole number of at least 1 and at most 256
        details: distflow data upload --help""",
    "list -t yaml": """
        distflow workflow list: `--format-type`: `yaml` is not one of `text`, `json`
        details: distflow workflow list --help""",
    "schema now": """
        distflow schema: unexpected argument: `now`
        usage: distflow schema [OPTIONS]
        details: distflow schema --help""",
}


@pytest.mark.parametrize("arguments", ERRORS)
def test_errors_of_the_parser_have_remedies(arguments: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(arguments.split()) == 2
    assert capsys.readouterr().err == f"error: {dedent(ERRORS[arguments]).strip()}\n"


def test_errors_of_the_parser_are_json_on_request(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["workflow", "query", "-t", "json"]) == 2
    assert json.loads(capsys.readouterr().out)["error"]["message"] == "distflow workflow query: `ID` is missing"


@pytest.mark.parametrize("arguments", [[], ["workflow"], ["pool"]])
def test_a_group_without_a_command_prints_its_help(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(arguments) == 2
    page = capsys.readouterr().err
    assert run([*arguments, "--help"]) == 0
    assert page == capsys.readouterr().out


def test_help_has_sections_and_the_width_of_the_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["workflow", "--help"]) == 0
    page = capsys.readouterr().out
    assert [line for line in page.splitlines() if line.endswith(":")] == [
        "Options:", "Run:", "Watch:", "Debug:", "Files:", "Manage:",
    ]  # fmt: skip
    widths = []
    for columns in (60, 150):
        monkeypatch.setenv("COLUMNS", str(columns))
        assert run(["workflow", "submit", "--help"]) == 0
        widths.append(max(len(line) for line in capsys.readouterr().out.splitlines() if "distflow workflow submit" not in line))
    assert widths[0] < 60
    assert 120 < widths[1] < 150


@pytest.mark.parametrize(
    ("name", "value", "has_colors"), [("NO_COLOR", "", True), ("NO_COLOR", "1", False), ("TERM", "dumb", False)]
)
def test_help_has_colors_on_a_terminal(
    name: str, value: str, has_colors: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["logs", "--help"]) == 0
    page = capsys.readouterr().out
    for variable, default in (("NO_COLOR", ""), ("TERM", "xterm"), (name, value)):
        monkeypatch.setenv(variable, default)
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    assert run(["logs", "--help"]) == 0
    shown = terminal.getvalue()
    assert ("\x1b[1mOptions:\x1b[0m" in shown, "\x1b[36m-f, --follow\x1b[0m  " in shown) == (has_colors, has_colors)
    assert shown.replace("\x1b[1m", "").replace("\x1b[36m", "").replace("\x1b[0m", "") == page
