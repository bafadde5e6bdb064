"""Who we are to distflow."""

from __future__ import annotations

import os

import pytest

from distflow.cli.app import run
from distflow.client.client import user_name
from unit.cli.screen import Screen


def test_a_user_without_a_name_is_called_by_the_number(
    screen: Screen, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("LOGNAME", "USER", "LNAME", "USERNAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "getuid", lambda: 2_000_000_123)
    assert user_name() == "2000000123"
    assert run(["profile", "list"]) == 0
    assert capsys.readouterr().out.startswith("User:  2000000123\n")
