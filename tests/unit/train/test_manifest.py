"""Checkpoint directories: publishing, replacing, removing and checking them, without torch."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from distflow.train.checkpoints.manifest import (
    MANIFEST,
    Manifest,
    clear_unfinished,
    describe,
    find_problems,
    found_steps,
    prune,
    publish,
    read_manifest,
    unfinished,
)


def write_checkpoint(directory: Path, step: int, text: str = "weights") -> Path:
    folder = unfinished(directory, step)
    folder.mkdir(parents=True)
    (folder / "a.bin").write_text(text)
    (folder / "b.bin").write_text("more")
    return publish(directory, Manifest(step=step, world_size=2, files=describe(folder, ["a.bin", "b.bin"])))


def test_a_published_checkpoint_has_no_problems(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, 12)
    assert folder == tmp_path / "step-12"
    manifest = read_manifest(folder)
    assert (manifest.step, manifest.world_size, sorted(manifest.files)) == (12, 2, ["a.bin", "b.bin"])
    assert find_problems(folder, manifest, ["a.bin", "b.bin"]) == []


def test_a_checkpoint_of_the_same_step_is_replaced(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, 1, "old")
    folder = write_checkpoint(tmp_path, 1, "new")
    assert (folder / "a.bin").read_text() == "new"
    assert [path.name for path in tmp_path.iterdir()] == ["step-1"]


def test_a_checkpoint_whose_replacement_was_interrupted_is_restored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The writer is killed when the old checkpoint is renamed and the new one is not yet."""
    write_checkpoint(tmp_path, 1, "old")
    rename = Path.rename

    def rename_until_killed(path: Path, target: Path) -> Path:
        if path.suffix == ".tmp":
            raise KeyboardInterrupt
        return rename(path, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", rename_until_killed)
        with pytest.raises(KeyboardInterrupt):
            write_checkpoint(tmp_path, 1, "new")
    assert found_steps(tmp_path) == []
    clear_unfinished(tmp_path)
    assert found_steps(tmp_path) == [1]
    assert (tmp_path / "step-1" / "a.bin").read_text() == "old"


def test_steps_are_sorted_as_numbers(tmp_path: Path) -> None:
    for step in (9, 100, 10):
        write_checkpoint(tmp_path, step)
    (tmp_path / "step-11.tmp").mkdir()
    (tmp_path / "step-x").mkdir()
    assert found_steps(tmp_path) == [100, 10, 9]
    clear_unfinished(tmp_path)
    assert not (tmp_path / "step-11.tmp").exists()
    assert found_steps(tmp_path / "nowhere") == []


def test_prune_does_not_count_or_remove_newer_checkpoints(tmp_path: Path) -> None:
    """If a newer checkpoint is damaged, a run continues from an older one. The checkpoint that it has just saved must stay."""
    for step in (1, 2, 3, 9):
        write_checkpoint(tmp_path, step)
    prune(tmp_path, newest=3, keep=2)
    assert found_steps(tmp_path) == [9, 3, 2]


def test_a_partly_removed_checkpoint_is_not_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process that removes it is killed halfway. The next save removes the remaining files."""
    for step in (1, 2):
        write_checkpoint(tmp_path, step)
    unlink = os.unlink

    def unlink_and_be_killed(*args: Any, **kwargs: Any) -> None:
        unlink(*args, **kwargs)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", unlink_and_be_killed)
        with pytest.raises(KeyboardInterrupt):
            prune(tmp_path, newest=2, keep=1)
    assert found_steps(tmp_path) == [2]
    clear_unfinished(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["step-2"]


def test_a_checkpoint_that_cannot_be_removed_causes_only_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On NFS, a removed file that another process has open only gets another name, so its directory is not empty."""
    for step in (1, 2):
        write_checkpoint(tmp_path, step)
    rmdir = os.rmdir

    def rmdir_with_an_open_file(path: str, **kwargs: Any) -> None:
        (tmp_path / path / ".nfs0001").touch()
        rmdir(path, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(os, "rmdir", rmdir_with_an_open_file)
        with pytest.warns(UserWarning, match=r"step-1\.tmp could not be removed.*Directory not empty"):
            prune(tmp_path, newest=2, keep=1)
        with pytest.warns(UserWarning, match=r"step-2\.tmp could not be removed.*Directory not empty"):
            write_checkpoint(tmp_path, 2, "new")
        with pytest.warns(UserWarning, match="could not be removed"):
            clear_unfinished(tmp_path)
    assert found_steps(tmp_path) == [2]
    assert (tmp_path / "step-2" / "a.bin").read_text() == "new"
    clear_unfinished(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["step-2"]


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (lambda path: path.write_text("wieghts"), "the checksum of a.bin differs from the one in manifest.json"),
        (lambda path: path.write_text(""), "a.bin has 0 bytes, not 7"),
        (lambda path: path.unlink(), "a.bin: No such file or directory"),
    ],
)
def test_a_damaged_file_is_named(tmp_path: Path, damage: object, problem: str) -> None:
    folder = write_checkpoint(tmp_path, 1)
    assert callable(damage)
    damage(folder / "a.bin")
    assert find_problems(folder, read_manifest(folder), ["a.bin", "b.bin"]) == [problem]


@pytest.mark.parametrize("text", ["", "[]", "{}", json.dumps({"step": 1, "world_size": 1, "files": {"a": 1}}), "\x00"])
def test_an_invalid_manifest_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / MANIFEST).write_text(text)
    with pytest.raises(ValueError, match=r"."):
        read_manifest(tmp_path)
