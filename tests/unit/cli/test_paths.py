"""Paths that cannot be inspected. The tests use names that are too long, because root can read every directory."""

from __future__ import annotations

from pathlib import Path

import pytest

from distflow.cli.app import run
from unit.cli.screen import Screen

LONG = "a" * 300


@pytest.mark.usefixtures("screen")
def test_a_list_file_that_cannot_be_written_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "one.txt").write_text("1")
    assert run(["data", "list", f"file://{tmp_path}/one.txt", LONG]) == 2
    assert capsys.readouterr().err.startswith(f"error: `{LONG}` cannot be written: File name too long\n")


def test_a_junit_report_that_cannot_be_written_is_refused_before_the_submission(
    screen: Screen, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["submit", "-", "--wait", "--junit", f"{LONG}/x.xml"]) == 2
    assert "the directory does not exist or is not writable" in capsys.readouterr().err
    assert not screen.store.list()


@pytest.mark.usefixtures("screen")
@pytest.mark.parametrize(
    ("command", "code", "message"),
    [
        (["run", f"{LONG}.py"], 2, f"the script `{LONG}.py` does not exist"),
        (["run", "--project", LONG, "train.py"], 2, f"the project `{LONG}` is not a directory"),
        (["init", LONG, "--sample", "resume"], 2, f"{LONG}.yaml cannot be written: File name too long"),
        (["init", f"{LONG}/x", "--sample", "resume"], 2, f"{LONG}/x.yaml cannot be written: File name too long"),
        (["data", "download", "file:///", LONG], 2, f"the directory {LONG} does not exist"),
        (["validate", f"{LONG}.py"], 2, f"{LONG}.py: error: the file cannot be read"),
    ],
)  # fmt: skip
def test_paths_that_cannot_be_inspected_are_errors(
    command: list[str],
    code: int,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    assert run(command) == code
    assert message in capsys.readouterr().err


@pytest.mark.usefixtures("screen")
def test_init_accepts_and_export_refuses_a_path_that_cannot_be_inspected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(["init", "x", "--command", f"{LONG}.py"]) == 0
    assert f"the script `{LONG}.py` does not exist in the project" in capsys.readouterr().err
    assert run(["workflow", "export", "x.yaml", "--to", "slurm", "--output", LONG]) == 2
    assert f"{LONG} cannot be written: File name too long" in capsys.readouterr().err
