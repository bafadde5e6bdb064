"""Directories of checkpoints, without torch."""

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


def write(directory: Path, step: int, text: str = "weights") -> Path:
    folder = unfinished(directory, step)
    folder.mkdir(parents=True)
    (folder / "a.bin").write_text(text)
    (folder / "b.bin").write_text("more")
    return publish(directory, Manifest(step=step, world_size=2, files=describe(folder, ["a.bin", "b.bin"])))


def test_a_checkpoint_is_there_when_it_is_whole(tmp_path: Path) -> None:
    place = write(tmp_path, 12)
    assert place == tmp_path / "step-12"
    manifest = read_manifest(place)
    assert (manifest.step, manifest.world_size, sorted(manifest.files)) == (12, 2, ["a.bin", "b.bin"])
    assert find_problems(place, manifest, ["a.bin", "b.bin"]) == []


def test_the_same_step_is_replaced(tmp_path: Path) -> None:
    write(tmp_path, 1, "old")
    place = write(tmp_path, 1, "new")
    assert (place / "a.bin").read_text() == "new"
    assert [path.name for path in tmp_path.iterdir()] == ["step-1"]


def test_one_that_is_replaced_is_there_at_any_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The writer is killed between the two names: the step is not lost, neither for a reader nor for the next writer."""
    write(tmp_path, 1, "old")
    rename = Path.rename

    def killed(path: Path, target: Path) -> Path:
        if path.suffix == ".tmp":
            raise KeyboardInterrupt
        return rename(path, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", killed)
        with pytest.raises(KeyboardInterrupt):
            write(tmp_path, 1, "new")
    assert found_steps(tmp_path) == []
    clear_unfinished(tmp_path)
    assert found_steps(tmp_path) == [1]
    assert (tmp_path / "step-1" / "a.bin").read_text() == "old"


def test_steps_are_numbers_and_not_texts(tmp_path: Path) -> None:
    for step in (9, 100, 10):
        write(tmp_path, step)
    (tmp_path / "step-11.tmp").mkdir()
    (tmp_path / "step-x").mkdir()
    assert found_steps(tmp_path) == [100, 10, 9]
    clear_unfinished(tmp_path)
    assert not (tmp_path / "step-11.tmp").exists()
    assert found_steps(tmp_path / "nowhere") == []


def test_only_older_ones_are_removed(tmp_path: Path) -> None:
    """A newer one may be broken, and the run went on from an older one: what it has just written stays."""
    for step in (1, 2, 3, 9):
        write(tmp_path, step)
    prune(tmp_path, newest=3, keep=2)
    assert found_steps(tmp_path) == [9, 3, 2]


def test_one_that_is_being_removed_is_not_there_any_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who removes it is killed in the middle: what is left is not taken for a checkpoint, and goes with the next save."""
    for step in (1, 2):
        write(tmp_path, step)
    unlink = os.unlink

    def and_then_killed(*given: Any, **named: Any) -> None:
        unlink(*given, **named)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", and_then_killed)
        with pytest.raises(KeyboardInterrupt):
            prune(tmp_path, newest=2, keep=1)
    assert found_steps(tmp_path) == [2]
    clear_unfinished(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["step-2"]


def test_one_that_somebody_reads_while_it_is_removed_ends_no_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On NFS a file that is open elsewhere on the machine gets another name in its directory, which then is not empty."""
    for step in (1, 2):
        write(tmp_path, step)
    rmdir = os.rmdir

    def opened(path: str, **named: Any) -> None:
        (tmp_path / path / ".nfs0001").touch()
        rmdir(path, **named)

    with monkeypatch.context() as patch:
        patch.setattr(os, "rmdir", opened)
        with pytest.warns(UserWarning, match=r"step-1\.tmp could not be removed.*Directory not empty"):
            prune(tmp_path, newest=2, keep=1)
        with pytest.warns(UserWarning, match=r"step-2\.tmp could not be removed.*Directory not empty"):
            write(tmp_path, 2, "new")
        with pytest.warns(UserWarning, match="could not be removed"):
            clear_unfinished(tmp_path)
    assert found_steps(tmp_path) == [2]
    assert (tmp_path / "step-2" / "a.bin").read_text() == "new"
    clear_unfinished(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["step-2"]


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (lambda path: path.write_text("wieghts"), "the checksum of a.bin differs from the one in manifest.json"),
        (lambda path: path.write_text(""), "a.bin has 0 bytes, not 7"),
        (lambda path: path.unlink(), "a.bin: No such file or directory"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, harm: object, said: str) -> None:
    place = write(tmp_path, 1)
    assert callable(harm)
    harm(place / "a.bin")
    assert find_problems(place, read_manifest(place), ["a.bin", "b.bin"]) == [said]


@pytest.mark.parametrize("text", ["", "[]", "{}", json.dumps({"step": 1, "world_size": 1, "files": {"a": 1}}), "\x00"])
def test_what_is_no_manifest_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / MANIFEST).write_text(text)
    with pytest.raises(ValueError, match=r"."):
        read_manifest(tmp_path)
