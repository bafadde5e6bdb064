"""Directories with results contain one workflow each, and lose no files."""

from __future__ import annotations

from pathlib import Path

import pytest

from distflow.client.results_directory import claim_directory, results_directories
from distflow.errors import StorageError
from distflow.spec.files import RESULTS_MARKER
from distflow.structs import replace
from unit.state.stored import running_group, workflow

FIRST = replace(workflow([running_group()]), id="train-1", uuid="1" * 32)
SECOND = replace(FIRST, id="train-2", uuid="2" * 32)


def _files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file() and path.name != RESULTS_MARKER}


def test_results_of_earlier_workflows_are_moved(tmp_path: Path) -> None:
    here = tmp_path / "outputs"
    assert claim_directory(here, FIRST) == (True, None)
    (here / "a").touch()
    assert claim_directory(here, FIRST) == (True, None)
    assert claim_directory(here, SECOND) == (True, here / "earlier-runs/train-1")
    (here / "b").touch()
    # A workflow of the same id from another state directory is a different workflow.
    assert claim_directory(here, replace(FIRST, uuid="3" * 32)) == (True, here / "earlier-runs/train-2")
    (here / "c").touch()
    assert claim_directory(here, SECOND) == (True, here / "earlier-runs/train-1.2")
    assert _files(here) == {"earlier-runs/train-1/a", "earlier-runs/train-2/b", "earlier-runs/train-1.2/c"}
    assert results_directories(tmp_path) == ["outputs"]


def test_directory_with_other_files_is_not_marked(tmp_path: Path) -> None:
    (tmp_path / "mine").touch()
    assert claim_directory(tmp_path, FIRST) == (False, None)
    assert _files(tmp_path) == {"mine"}
    assert not (tmp_path / RESULTS_MARKER).exists()
    with pytest.raises(StorageError, match="mine`: it is not a directory"):
        claim_directory(tmp_path / "mine", FIRST)


def test_invalid_name_in_a_marker_cannot_lead_to_another_path(tmp_path: Path) -> None:
    (tmp_path / RESULTS_MARKER).write_text("../../up x\n")
    assert claim_directory(tmp_path, FIRST) == (True, tmp_path / "earlier-runs/unknown")
