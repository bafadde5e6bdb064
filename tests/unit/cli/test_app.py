"""The root of the command line: what it makes of arguments before and after its commands."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from distflow.cli.app import run, wants_json


@pytest.fixture(autouse=True)
def _state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISTFLOW_STATE", str(tmp_path / "state"))


@pytest.mark.parametrize("option", ["--count", "--offset"])
def test_a_number_beyond_all_counting_is_as_many_as_there_are(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["workflow", "list", option, "9" * 20]) == 0
    assert "no" in capsys.readouterr().out.lower()


@pytest.mark.parametrize("asked", [["-t", "json"], ["-tjson"], ["--format-type", "json"], ["--format-type=json"]])
def test_errors_are_json_however_it_is_asked_for(asked: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["workflow", "query", "nope-1", *asked]) == 2
    assert json.loads(capsys.readouterr().out)["error"]["message"] == "there is no workflow 'nope-1'"


def test_t_means_a_task_where_osmo_has_it_so() -> None:
    assert not wants_json(["workflow", "logs", "w-1", "-tjson"])
    assert not wants_json(["workflow", "events", "w-1", "-t", "json"])
