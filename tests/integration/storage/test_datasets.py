"""Datasets in folders and at S3: versions are whole, numbered once, and never change."""

from __future__ import annotations

import json
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from distflow.documents.urls import StorageUrl, parse_url
from distflow.errors import NotFound, StorageError
from distflow.storage.datasets import DatasetFile, DatasetManifest, Datasets
from distflow.storage.failures import Retries, TransferCanceled
from distflow.storage.files import UploadSource, find_sources
from distflow.storage.stores import open_store
from distflow.storage.task_data import Delivery, deliver
from distflow.testing.s3 import S3Server
from distflow.testing.waiting import wait_until

quickly = partial(Retries, pauses_s=(0.0, 0.0))


@pytest.fixture(params=["file", "s3"])
def base(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[StorageUrl, Path]:
    """A URL where nothing is, and the folder that shows what is there."""
    if request.param == "file":
        return parse_url(f"file://{tmp_path}/store/sets"), tmp_path / "store" / "sets"
    server: S3Server = request.getfixturevalue("s3")
    bucket = server.bucket(f"d-{tmp_path.name.replace('_', '-').lower()}"[:60].rstrip("-"))
    return parse_url(f"s3://{bucket.name}/sets"), bucket / "sets"


def at(url: StorageUrl, retries: Retries | None = None) -> Datasets:
    return Datasets(open_store(url), url, retries or quickly())


def files(top: Path, **contents: bytes) -> tuple[UploadSource, ...]:
    top.mkdir(parents=True, exist_ok=True)
    for name, content in contents.items():
        (top / name).write_bytes(content)
    return find_sources([top], contents=True)


def test_versions_are_numbered_and_distinguished(base: tuple[StorageUrl, Path], tmp_path: Path) -> None:
    url, _ = base
    datasets = at(url)
    assert datasets.versions() == ()
    with pytest.raises(NotFound, match="no dataset `mnist`"):
        datasets.manifest("mnist")
    first = datasets.add("mnist", files(tmp_path / "a", x=b"1", y=b"22"), upload_id="m1", at=5.0)
    assert (first.number, first.size, first.created) == (1, 3, 5.0)
    second = datasets.add("mnist", files(tmp_path / "b", x=b"other"), upload_id="m2", at=6.0)
    datasets.add("mnist-2", files(tmp_path / "b"), upload_id="m3", at=7.0)
    assert [(one.name, one.number) for one in datasets.versions()] == [("mnist", 1), ("mnist", 2), ("mnist-2", 1)]
    assert [one.number for one in datasets.versions("mnist")] == [1, 2]
    assert datasets.manifest("mnist") == second
    assert datasets.manifest("mnist", 1) == first
    assert first.files[0] == DatasetFile(
        path="x", size=1, sha256="6b86b273ff34fce19d6b804eff5a3f5747ada4eaa22f1d49c01e52ddb7875b4b", number=1
    )
    with pytest.raises(NotFound, match=r"(?s)no version 7.*1, 2"):
        datasets.manifest("mnist", 7)
    assert datasets.fetch(first, tmp_path / "got").files == 2
    assert {path.name: path.read_bytes() for path in (tmp_path / "got").iterdir()} == {"x": b"1", "y": b"22"}
    assert datasets.fetch(first, tmp_path / "some", regex="y").files == 1
    assert datasets.fetch(first, tmp_path / "none", regex="z").files == 0


def test_a_number_is_never_used_again(base: tuple[StorageUrl, Path], tmp_path: Path) -> None:
    url, folder = base
    datasets = at(url)
    for mark in ("m1", "m2"):
        datasets.add("a", files(tmp_path / "a", x=b"1"), upload_id=mark, at=0.0)
    datasets.remove("a", 2)
    assert not list((folder / "data" / "a").glob("2/*"))
    assert datasets.add("a", files(tmp_path / "a"), upload_id="m3", at=0.0).number == 3
    datasets.remove("a", 1)
    assert [one.number for one in datasets.versions("a")] == [3]


def test_an_incomplete_version_is_not_listed_and_is_continued(base: tuple[StorageUrl, Path], tmp_path: Path) -> None:
    url, _ = base
    retries = quickly()
    source = files(tmp_path / "a", x=b"1" * 1000, y=b"2" * 1000)

    def stop(done: int, _: int) -> None:
        if done:
            retries.canceled.set()

    with pytest.raises(TransferCanceled):
        at(url, retries).add("a", source, upload_id="m1", at=0.0, on_progress=stop)
    assert at(url).versions() == ()
    # Another writer gets the next version, and the writer of the first one continues.
    assert at(url).add("a", source, upload_id="m2", at=0.0).number == 2
    first = at(url).add("a", source, upload_id="m1", at=1.0)
    assert first.number == 1
    # What was done is not done again.
    assert at(url).add("a", files(tmp_path / "else", z=b""), upload_id="m1", at=9.0) == first


def test_writers_at_the_same_time_get_numbers_of_their_own(base: tuple[StorageUrl, Path], tmp_path: Path) -> None:
    url, _ = base
    source = files(tmp_path / "a", x=b"1")
    together = threading.Barrier(4)

    def add(number: int) -> int:
        datasets = Datasets(open_store(url), url)
        together.wait(30)
        return datasets.add("a", source, upload_id=f"m{number}", at=0.0).number

    with ThreadPoolExecutor(4) as pool:
        numbers = list(pool.map(add, range(4)))
    assert len(set(numbers)) == 4
    assert sorted(numbers) == [one.number for one in at(url).versions("a")]


def test_changes_in_the_store_are_noticed(base: tuple[StorageUrl, Path], tmp_path: Path) -> None:
    url, folder = base
    datasets = at(url)
    manifest = datasets.add("a", files(tmp_path / "a", x=b"1", y=b"2"), upload_id="m1", at=0.0)
    (folder / "data" / "a" / "1" / "extra").write_bytes(b"")
    assert datasets.fetch(manifest, tmp_path / "got").files == 2
    (folder / "data" / "a" / "1" / "x").write_bytes(b"?")
    with pytest.raises(StorageError, match="data/a/1/x was changed since it was uploaded"):
        datasets.fetch(manifest, tmp_path / "got")
    # The good file of the download before is kept.
    assert (tmp_path / "got" / "x").read_bytes() == b"1"
    (folder / "data" / "a" / "1" / "x").unlink()
    with pytest.raises(StorageError, match="data/a/1/x is missing"):
        at(url).fetch(manifest, tmp_path / "more")
    (folder / "versions" / "a" / "1.json").write_text("{}")
    with pytest.raises(StorageError, match="is not a manifest"):
        at(url).manifest("a")


BAD = "0" * 64


@pytest.mark.parametrize(
    "change",
    [
        {"path": "../../../home/authorized_keys", "sha256": BAD},
        {"path": "/home/authorized_keys"}, {"path": ""}, {"path": "."}, {"path": "a/./b"}, {"path": "a\0b"}, {"path": 3},
        {"path": "x" * 256}, {"path": "y/z"}, {"path": "y"}, {"sha256": "zz"}, {"sha256": None},
        {"size": -1}, {"size": "1"}, {"size": 1e400}, {"version": 0}, {"version": True}, {"version": "../1"},
    ],
)  # fmt: skip
def test_a_manifest_that_another_user_wrote(change: dict[str, object], base: tuple[StorageUrl, Path], tmp_path: Path) -> None:
    url, folder = base
    datasets = at(url)
    datasets.add("a", files(tmp_path / "a", x=b"1", y=b"2"), upload_id="m1", at=0.0)
    victim = tmp_path / "home" / "authorized_keys"
    victim.parent.mkdir()
    victim.write_text("mine")
    manifest = folder / "versions" / "a" / "1.json"
    body = json.loads(manifest.read_text())
    body["files"][0] |= change
    manifest.write_text(json.dumps(body))
    with pytest.raises(StorageError, match="is not a manifest of a dataset"):
        datasets.fetch(datasets.manifest("a"), tmp_path / "home" / "got" / "deep" / "er")
    assert victim.read_text() == "mine"
    assert [path.name for path in (tmp_path / "home").rglob("*")] == ["authorized_keys"]


@pytest.mark.parametrize("text", ["[" * 100_000, '{"created": ' + "9" * 400 + "}", '{"created": NaN, "files": []}', "\xff"])
def test_a_manifest_that_cannot_be_decoded(text: str, base: tuple[StorageUrl, Path], tmp_path: Path) -> None:
    url, folder = base
    datasets = at(url)
    datasets.add("a", files(tmp_path / "a", x=b"1"), upload_id="m1", at=0.0)
    (folder / "versions" / "a" / "1.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(StorageError, match="is not a manifest of a dataset"):
        datasets.manifest("a")


@pytest.mark.parametrize("resume", [False, True])
def test_a_download_that_fails_leaves_the_files_of_the_user(
    resume: bool, base: tuple[StorageUrl, Path], tmp_path: Path
) -> None:
    url, folder = base
    datasets = at(url)
    manifest = datasets.add("a", files(tmp_path / "a", x=b"1", y=b"2"), upload_id="m1", at=0.0)
    (folder / "data" / "a" / "1" / "x").write_bytes(b"?")
    mine = tmp_path / "got" / "x"
    mine.parent.mkdir()
    mine.write_bytes(b"!")
    with pytest.raises(StorageError, match="its SHA-256 differs"):
        datasets.fetch(manifest, tmp_path / "got", resume=resume)
    assert mine.read_bytes() == b"!"
    # A user's own file in the place of one that the store has lost is not part of the version.
    (folder / "data" / "a" / "1" / "x").unlink()
    with pytest.raises(StorageError, match="is missing from the store"):
        at(url).fetch(manifest, tmp_path / "got", resume=resume)
    assert mine.read_bytes() == b"!"


def test_claims_that_are_not_numbers_are_ignored(base: tuple[StorageUrl, Path], tmp_path: Path) -> None:
    url, folder = base
    claims = folder / "claims" / "a"
    claims.mkdir(parents=True)
    for name in ("\u00b2.m9", "9" * 100 + ".m9"):
        (claims / name).write_text("")
    assert at(url).add("a", files(tmp_path / "a", x=b"1"), upload_id="m1", at=0.0).number == 1


def put(top: Path, **contents: str) -> tuple[UploadSource, ...]:
    """Files of a folder of its own; ``__`` in a name stands for a slash."""
    for name, content in contents.items():
        path = top / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return find_sources([top], contents=True)


def held(datasets: Datasets, name: str, number: int | None, target: Path) -> dict[str, str]:
    datasets.fetch(datasets.manifest(name, number), target)
    return {str(path.relative_to(target)): path.read_text() for path in target.rglob("*") if path.is_file()}


def test_an_update_holds_the_old_and_the_new_files(base: tuple[StorageUrl, Path], tmp_path: Path) -> None:
    url, folder = base
    datasets = at(url)
    with pytest.raises(NotFound, match="no dataset `a`"):
        datasets.update("a", put(tmp_path / "none", x="1"), upload_id="m0", at=0.0)
    first = datasets.add("a", put(tmp_path / "one", x="1", y="1", d__e="1", f="1"), upload_id="m1", at=1.0)
    sent: list[tuple[int, int]] = []
    new = put(tmp_path / "two", y="22", z="2", d="2", f__g="2")
    second = datasets.update("a", new, upload_id="m2", at=2.0, on_progress=lambda *moved: sent.append(moved))
    assert sent[-1] == (5, 5)  # nothing of what was there
    assert (second.number, second.created) == (first.number + 1, 2.0)
    # A file takes the place of a directory, and the other way round.
    assert held(datasets, "a", None, tmp_path / "got") == {"x": "1", "y": "22", "z": "2", "d": "2", "f/g": "2"}
    told: list[tuple[int, int]] = []
    assert datasets.fetch(second, tmp_path / "again", on_progress=lambda *moved: told.append(moved)).files == 5
    assert told[-1] == (6, 6)
    assert sorted(told) == told
    # The same writing again is the same version; another one may add to an older version.
    assert datasets.update("a", new, upload_id="m2", at=9.0) == second
    third = datasets.update("a:1", put(tmp_path / "three", only="3"), upload_id="m3", at=3.0)
    assert held(datasets, "a", third.number, tmp_path / "old") == {"x": "1", "y": "1", "d/e": "1", "f": "1", "only": "3"}
    with pytest.raises(NotFound, match="no version 7"):
        datasets.update("a:7", new, upload_id="m4", at=4.0)
    assert not list((folder / "turns").rglob("m*"))


def test_files_of_other_versions_stay_when_one_is_removed(base: tuple[StorageUrl, Path], tmp_path: Path) -> None:
    url, folder = base
    datasets = at(url)
    datasets.add("a", put(tmp_path / "one", x="1", y="1"), upload_id="m1", at=0.0)
    datasets.update("a", put(tmp_path / "two", y="2"), upload_id="m2", at=0.0)
    datasets.update("a", put(tmp_path / "three", y="2", z="3"), upload_id="m3", at=0.0)  # y is stored only once

    def data() -> list[str]:
        return sorted(str(path.relative_to(folder / "data" / "a")) for path in (folder / "data").rglob("*") if path.is_file())

    datasets.remove("a", 1)
    assert data() == ["1/x", "2/y", "3/z"]
    assert held(datasets, "a", 3, tmp_path / "got") == {"x": "1", "y": "2", "z": "3"}
    datasets.remove("a", 3)
    assert data() == ["1/x", "2/y"]
    datasets.remove("a", 2)
    datasets.remove("a", 2)
    assert data() == []


def test_no_files_are_lost_when_several_add_at_the_same_time(base: tuple[StorageUrl, Path], tmp_path: Path) -> None:
    url, _ = base
    at(url).add("a", put(tmp_path / "first", x="1"), upload_id="m", at=0.0)
    made = [put(tmp_path / f"of{number}", **{f"rank{number}": str(number)}) for number in range(4)]
    together = threading.Barrier(4)

    class Slow(Datasets):
        """Lets a moment pass between the read of the present state and the write of the new one."""

        def _put(self, manifest: DatasetManifest) -> None:
            threading.Event().wait(0.3)
            super()._put(manifest)

    def update(number: int) -> int:
        datasets = Slow(open_store(url), url)
        together.wait(30)
        return datasets.update("a", made[number], upload_id=f"m{number}", at=0.0).number

    with ThreadPoolExecutor(4) as pool:
        numbers = list(pool.map(update, range(4)))
    assert sorted({1, *numbers}) == [one.number for one in at(url).versions("a")]
    assert len(set(numbers)) == 4
    names = {"x": "1", "rank0": "0", "rank1": "1", "rank2": "2", "rank3": "3"}
    assert held(at(url), "a", None, tmp_path / "got") == names


def test_an_abandoned_turn_expires(base: tuple[StorageUrl, Path], tmp_path: Path) -> None:
    url, folder = base
    if url.scheme != "file":
        pytest.skip("times of the server cannot be set")
    at(url).add("a", put(tmp_path / "one", x="1"), upload_id="m1", at=0.0)
    turn = folder / "turns" / "a" / "gone"
    turn.parent.mkdir(parents=True)
    turn.touch()
    new = put(tmp_path / "two", y="2")
    with ThreadPoolExecutor(1) as pool:
        made = pool.submit(at(url).update, "a", new, upload_id="m2", at=0.0)
        # It requests the lock, yields and requests it again. Each time, a file appears for a moment.
        seen: set[int] = set()

        def has_come_and_gone() -> bool:
            seen.add(turn.parent.stat().st_mtime_ns)
            return len(seen) > 3

        wait_until(has_come_and_gone, 30)
        assert not made.done()
        os.utime(turn, (1.0, 1.0))
        assert made.result(30).number == 2


@pytest.mark.parametrize("path", [".", "./.", ""])
def test_the_whole_output_has_no_name_of_its_own(path: str, tmp_path: Path) -> None:
    files(tmp_path / "scratch-0" / "sub", b=b"2")
    url = parse_url(f"file://{tmp_path}/store/sets")
    deliver(open_store(url), Delivery(url=str(url), dataset="d", paths=(path, "sub"), upload_id="m"), tmp_path / "scratch-0")
    assert [one.path for one in at(url).manifest("d").files] == ["sub/b"]
