"""Helpers for tests of commands: run them in this process, and compare their output with goldens."""

from __future__ import annotations

import difflib
import io
import os
from pathlib import Path

import pytest

from distflow.cli.app import run
from distflow.client.client import Client
from distflow.state.directory import StateDirectory
from distflow.state.store import Store

GOLDENS = Path(__file__).parents[2] / "goldens" / "cli"
RENEW = "DISTFLOW_RENEW_GOLDENS=1 pytest tests/unit/cli"


class Terminal(io.StringIO):
    """A stream whose ``isatty`` returns True."""

    def isatty(self) -> bool:
        return True


class Screen:
    """Runs commands on a state directory, and keeps the output of the last one."""

    def __init__(self, directory: StateDirectory, capsys: pytest.CaptureFixture[str]) -> None:
        self.directory = directory
        self.store = Store(directory.store)
        self.client = Client()
        self.out = ""
        self.err = ""
        self._capsys = capsys

    def run(self, *arguments: str) -> int:
        """Run ``distflow workflow …`` and return its exit code."""
        self._capsys.readouterr()
        code = run(["workflow", *arguments])
        self.out, self.err = self._capsys.readouterr()
        return code


def assert_golden(golden: str, found: str) -> None:
    """Fail if the output differs from the golden, with the difference and the command that renews the golden."""
    path = GOLDENS / golden
    if os.environ.get("DISTFLOW_RENEW_GOLDENS"):
        path.write_text(found, encoding="utf-8")
    wanted = path.read_text(encoding="utf-8") if path.exists() else ""
    if found != wanted:
        lines = difflib.unified_diff(wanted.splitlines(), found.splitlines(), golden, "now", lineterm="")
        pytest.fail("\n".join([*lines, "", f"to accept the new output: {RENEW}"]), pytrace=False)
