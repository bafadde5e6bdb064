"""Files of the user that cannot be inspected. Their name is too long, because root can read every directory."""

from __future__ import annotations

from pathlib import Path

import pytest

from distflow.cli.app import run
from unit.cli.screen import Screen

LONG = "a" * 300


@pytest.mark.usefixtures("screen")
def test_the_file_of_a_list_is_an_error_and_not_a_crash(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "one.txt").write_text("1")
    assert run(["data", "list", f"file://{tmp_path}/one.txt", LONG]) == 2
    assert capsys.readouterr().err == f"error: {LONG}: File name too long\n"


def test_a_report_in_such_a_directory_is_refused_before_the_start(screen: Screen, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["submit", "-", "--wait", "--junit", f"{LONG}/x.xml"]) == 2
    assert "the directory does not exist or is not writable" in capsys.readouterr().err
    assert not screen.store.list()
