"""The files that hold the state, the end and the error of an attempt."""

from __future__ import annotations

import json
import os
import select
from contextlib import nullcontext
from pathlib import Path

import pytest

from distflow.protocol.ends import EndReason
from distflow.runtime.files import records


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    dir_fd = os.open(tmp_path, os.O_RDONLY)
    os.close(records.allocate(dir_fd, records.STATE, records.STATE_BYTES))
    os.close(dir_fd)
    return tmp_path


def write(directory: Path, state: dict[str, object]) -> None:
    fd = os.open(directory / records.STATE, os.O_RDWR)
    records.write_state(fd, state)
    os.close(fd)


def test_a_state_that_was_not_written_yet_is_none(directory: Path) -> None:
    assert records.read_state(str(directory)) is None


def test_a_shorter_state_replaces_a_longer_one_completely(directory: Path) -> None:
    write(directory, {"why": "x" * 3000})
    write(directory, {"why": "y"})
    assert records.read_state(str(directory)) == {"why": "y"}
    assert (directory / records.STATE).stat().st_size == records.STATE_BYTES


def test_a_reason_that_is_too_long_is_left_out(directory: Path) -> None:
    write(directory, {"why": "ü" * 5000, "phase": "stopping"})
    assert records.read_state(str(directory)) == {"why": None, "phase": "stopping", "message": None}


def test_a_state_may_be_larger_than_the_allocated_space(directory: Path) -> None:
    container = {"env": {"STORAGE_OPTIONS": "x" * records.STATE_BYTES}}
    write(directory, {"phase": "running", "container": container})
    state = records.read_state(str(directory)) or {}
    assert (state["phase"], state["container"]) == ("running", container)
    write(directory, {"phase": "stopping"})
    assert records.read_state(str(directory)) == {"phase": "stopping"}


def test_reading_waits_for_a_state_that_is_being_written(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(directory, {"phase": "running"})
    whole = (directory / records.STATE).read_bytes()
    new = json.dumps({"why": "x" * 100, "phase": "stopping"}).encode()
    (directory / records.STATE).write_bytes(new[:64] + whole[64:])  # the writer was interrupted
    pauses: list[object] = []

    def pause(*_: object) -> None:
        pauses.append(None)
        if len(pauses) == 10:
            (directory / records.STATE).write_bytes(new.ljust(len(whole)))

    monkeypatch.setattr(select, "select", pause)
    assert (records.read_state(str(directory)) or {}).get("phase") == "stopping"


def test_an_end_is_readable_only_when_it_is_complete(tmp_path: Path) -> None:
    dir_fd = os.open(tmp_path, os.O_RDONLY)
    fd = records.allocate(dir_fd, records.SPARE_END, records.END_BYTES)
    assert records.read_end(str(tmp_path)) is None
    end = records.make_end({"started_at": 1.0, "why": None}, EndReason.EXITED, exit_code=3, ended_at=2.0)
    records.write_end(dir_fd, fd, end)
    assert records.read_end(str(tmp_path)) == end
    assert (tmp_path / records.END).stat().st_size == len(json.dumps(end))
    assert not (tmp_path / records.SPARE_END).exists()
    os.close(fd)
    os.close(dir_fd)


@pytest.mark.parametrize("content", ["", "{", "[]", "[" * 100_000])
def test_an_invalid_error_file_is_ignored(tmp_path: Path, content: str) -> None:
    (tmp_path / "error.json").write_text(content)
    assert records.read_error(str(tmp_path)) is None


@pytest.mark.parametrize("has_writer", [False, True])
def test_named_pipes_in_place_of_the_files_do_not_block(has_writer: bool, tmp_path: Path) -> None:
    readers = {"error.json": records.read_error, "runner.json": records.read_state, "exit.json": records.read_end}
    for name, read in readers.items():
        os.mkfifo(tmp_path / name)
        with open(tmp_path / name, "rb+", buffering=0) if has_writer else nullcontext():
            assert read(str(tmp_path)) is None
