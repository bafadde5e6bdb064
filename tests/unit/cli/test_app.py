"""The root of the command line: what it makes of arguments before and after its commands."""

from __future__ import annotations

from pathlib import Path

import pytest

from distflow.cli.app import run


@pytest.fixture(autouse=True)
def _state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISTFLOW_STATE", str(tmp_path / "state"))


@pytest.mark.parametrize("option", ["--count", "--offset"])
def test_a_number_beyond_all_counting_is_as_many_as_there_are(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["workflow", "list", option, "9" * 20]) == 0
    assert "no" in capsys.readouterr().out.lower()
