"""Commands that a launcher can start once for each rank."""

from __future__ import annotations

import pytest

from distflow.layout.checks.launchers import PythonCommand, python_command


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["python3", "train.py", "-m", "x"], PythonCommand(target="train.py", arguments=("-m", "x"))),
        (["./train.py"], PythonCommand(target="./train.py")),
        (["/opt/venv/bin/python3.12", "-u", "t"], PythonCommand(interpreter="/opt/venv/bin/python3.12", target="t")),
        (["pypy3", "-u", "-m", "a.b", "1"], PythonCommand(interpreter="pypy3", target="a.b", is_module=True, arguments=("1",))),
    ],
)
def test_a_python_command_is_parsed(words: list[str], expected: PythonCommand) -> None:
    assert python_command(words) == expected


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["bash", "-c", "python3 train.py"], "`bash` is not a Python interpreter"),
        (["pythonista", "train.py"], "`pythonista` is not a Python interpreter"),
        (["python3"], "the command has no script"),
        (["python3", "-u"], "the command has no script"),
        (["python3", "-c", "1"], "`-c`"),
        (["python3", "-m"], "-m"),
        (["python3", "-X", "dev", "train.py"], "option `-X`"),
        (["python3", "-s", "train.py"], "option `-s`"),
        ([], "`` is not a Python interpreter"),
    ],
)
def test_other_commands_are_refused_with_the_reason(words: list[str], reason: str) -> None:
    found = python_command(words)
    assert isinstance(found, str)
    assert reason in found
