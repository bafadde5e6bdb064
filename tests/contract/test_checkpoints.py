"""Fetching directories of running attempts: whole files only, and no archive remains on the node."""

from __future__ import annotations

import os
import sys
import tarfile
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from contract.conftest import EVERY_TRANSPORT, LOCAL_TRANSPORT
from distflow.backends.machines.connection.transfers import Fetched, fetch_output
from distflow.errors import AgentError
from distflow.testing.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable

    from contract.conftest import NodeUnderTest

pytestmark = LOCAL_TRANSPORT


@pytest.fixture
def models(node: NodeUnderTest) -> Path:
    """The directory of an attempt that the tests fetch."""
    path = node.root / node.attempt() / "files" / "tmp" / "models"
    path.mkdir(parents=True)
    return path


def fetch(
    node: NodeUnderTest,
    models: Path,
    blobs: Path,
    place: str = "files/tmp/models",
    stays: Callable[[str, int], bool] | None = None,
) -> Fetched:
    blobs.mkdir(exist_ok=True)
    attempt = models.parents[2].relative_to(node.root).as_posix()
    return fetch_output(node.transport, str(node.top), sys.executable, attempt, blobs, place=place, timeout_s=20, stays=stays)


def read_archive(blobs: Path, fetched: Fetched) -> dict[str, bytes | None]:
    with tarfile.open(blobs / fetched.digest) as tar:
        found = {}
        for one in tar:
            file = tar.extractfile(one) if one.isreg() else None
            found[one.name] = file.read() if file else None
        return found


@EVERY_TRANSPORT
def test_a_directory_is_fetched_under_its_name_and_its_archive_is_removed(
    node: NodeUnderTest, models: Path, tmp_path: Path
) -> None:
    (models / "sub").mkdir()
    (models / "sub" / "a.pt").write_bytes(b"one")
    first = fetch(node, models, tmp_path / "blobs")
    assert read_archive(tmp_path / "blobs", first) == {"models": None, "models/sub": None, "models/sub/a.pt": b"one"}
    wait_until(lambda: not (node.root / "blobs" / first.digest).exists(), 20, "the archive is removed")
    assert fetch(node, models, tmp_path / "blobs").digest == first.digest
    (models / "sub" / "a.pt").write_bytes(b"two")
    assert fetch(node, models, tmp_path / "blobs").digest != first.digest


def test_equal_directories_of_two_tasks_are_both_fetched(node: NodeUnderTest, models: Path, tmp_path: Path) -> None:
    other = node.root / node.attempt() / "files" / "tmp" / "models"
    for path in (models, other):
        path.mkdir(parents=True, exist_ok=True)
        (path / "step").write_bytes(b"one")
    with_other: list[Fetched] = []

    def is_packed(digest: str, size: int) -> bool:
        with_other.append(fetch(node, other, tmp_path / "others"))
        wait_until(lambda: not (node.root / "blobs" / digest).exists(), 20, "the archive of the other one is removed")
        return False

    first = fetch(node, models, tmp_path / "blobs", stays=is_packed)
    assert [one.digest for one in with_other] == [first.digest]
    assert read_archive(tmp_path / "blobs", first) == {"models": None, "models/step": b"one"}


def test_a_file_with_a_time_in_the_future_is_fetched(node: NodeUnderTest, models: Path, tmp_path: Path) -> None:
    (models / "from-tomorrow").write_bytes(b"one")
    os.utime(models / "from-tomorrow", (4_000_000_000, 4_000_000_000))
    assert fetch(node, models, tmp_path / "blobs").files == 2


def test_an_empty_or_missing_directory_makes_no_archive(node: NodeUnderTest, models: Path, tmp_path: Path) -> None:
    assert fetch(node, models, tmp_path / "blobs") == Fetched(digest="", size=0, files=0, left_out=())
    models.rmdir()
    assert fetch(node, models, tmp_path / "blobs").digest == ""
    assert list((tmp_path / "blobs").iterdir()) == []


def test_files_that_change_all_the_time_are_left_out_and_named(node: NodeUnderTest, models: Path, tmp_path: Path) -> None:
    (models / "whole.pt").write_bytes(os.urandom(4_000_000))
    stop = threading.Event()

    def write() -> None:
        number = 0
        while not stop.wait(0.001):
            number += 1
            (models / "log").write_text("x" * (number % 7))
            (models / "a.tmp").write_text("y")
            (models / "a.tmp").unlink()

    writer = threading.Thread(target=write)
    writer.start()
    try:
        # On a busy machine, the writer may not run for a moment. Then no file changes.
        fetched = wait_until(
            lambda: one if "models/log" in (one := fetch(node, models, tmp_path / "blobs")).left_out else None, 60
        )
    finally:
        stop.set()
        writer.join()
    found = read_archive(tmp_path / "blobs", fetched)
    assert len(found["models/whole.pt"] or b"") == 4_000_000
    assert "models/log" not in found


def test_a_directory_whose_files_all_change_is_refused(node: NodeUnderTest, models: Path, tmp_path: Path) -> None:
    stop = threading.Event()

    def write() -> None:
        while not stop.wait(0.001):
            (models / "big").write_bytes(os.urandom(100_000))

    def refusal() -> AgentError | None:
        try:
            fetch(node, models, tmp_path / "blobs")
        except AgentError as error:
            return error
        return None

    (models / "big").write_bytes(b"first")
    writer = threading.Thread(target=write)
    writer.start()
    try:
        refused = wait_until(refusal, 60)
    finally:
        stop.set()
        writer.join()
    assert (refused.kind, "change all the time" in refused.message) == ("busy", True)


@pytest.mark.parametrize("place", ["../1/work", "/etc", "work/../../x", ""])
def test_a_path_outside_the_attempt_is_refused(node: NodeUnderTest, models: Path, tmp_path: Path, place: str) -> None:
    with pytest.raises(AgentError) as caught:
        fetch(node, models, tmp_path / "blobs", place)
    assert caught.value.kind == "bad_request"


def test_a_link_to_a_directory_outside_the_attempt_is_not_followed(node: NodeUnderTest, models: Path, tmp_path: Path) -> None:
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret" / "key").write_text("canary")
    models.rmdir()
    models.symlink_to(tmp_path / "secret")
    assert fetch(node, models, tmp_path / "blobs").digest == ""
    with pytest.raises(AgentError):
        fetch(node, models, tmp_path / "blobs", "files/tmp/models/sub")
