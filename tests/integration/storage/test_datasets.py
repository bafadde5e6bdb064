"""Datasets in folders and in S3: versions are complete, have unique numbers, and never change."""

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

fast_retries = partial(Retries, pauses_s=(0.0, 0.0))


@pytest.fixture(params=["file", "s3"])
def base(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[StorageUrl, Path]:
    """An empty URL, and the folder with its data."""
    if request.param == "file":
        return parse_url(f"file://{tmp_path}/store/sets"), tmp_path / "store" / "sets"
    server: S3Server = request.getfixturevalue("s3")
    bucket = server.bucket(f"d-{tmp_path.name.replace('_', '-').lower()}"[:60].rstrip("-"))
    return parse_url(f"s3://{bucket.name}/sets"), bucket / "sets"


def open_datasets(url: StorageUrl, retries: Retries | None = None) -> Datasets:
    return Datasets(open_store(url), url, retries or fast_retries())


def write_files(top: Path, **contents: bytes) -> tuple[UploadSource, ...]:
    top.mkdir(parents=True, exist_ok=True)
    for name, content in contents.items():
        (top / name).write_bytes(content)
    return find_sources([top], contents=True)


def test_versions_are_numbered_and_distinguished(base: tuple[StorageUrl, Path], tmp_path: Path) -> None:
    url, _ = base
    datasets = open_datasets(url)
    assert datasets.versions() == ()
    with pytest.raises(NotFound, match="no dataset `mnist`"):
        datasets.manifest("mnist")
    first = datasets.add("mnist", write_files(tmp_path / "a", x=b"1", y=b"22"), upload_id="m1", at=5.0)
    assert (first.number, first.size, first.created) == (1, 3, 5.0)
    second = datasets.add("mnist", write_files(tmp_path / "b", x=b"other"), upload_id="m2", at=6.0)
    datasets.add("mnist-2", write_files(tmp_path / "b"), upload_id="m3", at=7.0)
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


def test_the_number_of_a_removed_version_is_never_used_again(base: tuple[StorageUrl, Path], tmp_path: Path) -> None:
    url, folder = base
    datasets = open_datasets(url)
    for mark in ("m1", "m2"):
        datasets.add("a", write_files(tmp_path / "a", x=b"1"), upload_id=mark, at=0.0)
    datasets.remove("a", 2)
    assert not list((folder / "data" / "a").glob("2/*"))
    assert datasets.add("a", write_files(tmp_path / "a"), upload_id="m3", at=0.0).number == 3
    datasets.remove("a", 1)
    assert [one.number for one in datasets.versions("a")] == [3]


def test_an_incomplete_version_is_not_listed_and_is_continued(base: tuple[StorageUrl, Path], tmp_path: Path) -> None:
    url, _ = base
    retries = fast_retries()
    source = write_files(tmp_path / "a", x=b"1" * 1000, y=b"2" * 1000)

    def stop(done: int, _: int) -> None:
        if done:
            retries.canceled.set()

    with pytest.raises(TransferCanceled):
        open_datasets(url, retries).add("a", source, upload_id="m1", at=0.0, on_progress=stop)
    assert open_datasets(url).versions() == ()
    # Another writer gets the next version, and the writer of the first one continues.
    assert open_datasets(url).add("a", source, upload_id="m2", at=0.0).number == 2
    first = open_datasets(url).add("a", source, upload_id="m1", at=1.0)
    assert first.number == 1
    # A finished upload is not repeated.
    assert open_datasets(url).add("a", write_files(tmp_path / "else", z=b""), upload_id="m1", at=9.0) == first


def test_concurrent_uploads_get_different_numbers(base: tuple[StorageUrl, Path], tmp_path: Path) -> None:
    url, _ = base
    source = write_files(tmp_path / "a", x=b"1")
    barrier = threading.Barrier(4)

    def add(number: int) -> int:
        datasets = Datasets(open_store(url), url)
        barrier.wait(30)
        return datasets.add("a", source, upload_id=f"m{number}", at=0.0).number

    with ThreadPoolExecutor(4) as pool:
        numbers = list(pool.map(add, range(4)))
    assert len(set(numbers)) == 4
    assert sorted(numbers) == [one.number for one in open_datasets(url).versions("a")]


def test_changes_in_the_store_are_detected(base: tuple[StorageUrl, Path], tmp_path: Path) -> None:
    url, folder = base
    datasets = open_datasets(url)
    manifest = datasets.add("a", write_files(tmp_path / "a", x=b"1", y=b"2"), upload_id="m1", at=0.0)
    (folder / "data" / "a" / "1" / "extra").write_bytes(b"")
    assert datasets.fetch(manifest, tmp_path / "got").files == 2
    (folder / "data" / "a" / "1" / "x").write_bytes(b"?")
    with pytest.raises(StorageError, match="data/a/1/x has changed since it was uploaded"):
        datasets.fetch(manifest, tmp_path / "got")
    # The correct file of the first download is kept.
    assert (tmp_path / "got" / "x").read_bytes() == b"1"
    (folder / "data" / "a" / "1" / "x").unlink()
    with pytest.raises(StorageError, match="data/a/1/x is missing"):
        open_datasets(url).fetch(manifest, tmp_path / "more")
    (folder / "versions" / "a" / "1.json").write_text("{}")
    with pytest.raises(StorageError, match="is not a manifest"):
        open_datasets(url).manifest("a")


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
def test_a_manifest_with_invalid_values_is_refused_and_writes_no_files(
    change: dict[str, object], base: tuple[StorageUrl, Path], tmp_path: Path
) -> None:
    url, folder = base
    datasets = open_datasets(url)
    datasets.add("a", write_files(tmp_path / "a", x=b"1", y=b"2"), upload_id="m1", at=0.0)
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
def test_a_manifest_that_cannot_be_decoded_is_refused(text: str, base: tuple[StorageUrl, Path], tmp_path: Path) -> None:
    url, folder = base
    datasets = open_datasets(url)
    datasets.add("a", write_files(tmp_path / "a", x=b"1"), upload_id="m1", at=0.0)
    (folder / "versions" / "a" / "1.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(StorageError, match="is not a manifest of a dataset"):
        datasets.manifest("a")


@pytest.mark.parametrize("resume", [False, True])
def test_a_failed_download_keeps_the_files_of_the_user(resume: bool, base: tuple[StorageUrl, Path], tmp_path: Path) -> None:
    url, folder = base
    datasets = open_datasets(url)
    manifest = datasets.add("a", write_files(tmp_path / "a", x=b"1", y=b"2"), upload_id="m1", at=0.0)
    (folder / "data" / "a" / "1" / "x").write_bytes(b"?")
    mine = tmp_path / "got" / "x"
    mine.parent.mkdir()
    mine.write_bytes(b"!")
    with pytest.raises(StorageError, match="its SHA-256 is different"):
        datasets.fetch(manifest, tmp_path / "got", resume=resume)
    assert mine.read_bytes() == b"!"
    # A file of the user does not replace a file that is missing from the store.
    (folder / "data" / "a" / "1" / "x").unlink()
    with pytest.raises(StorageError, match="is missing from the store"):
        open_datasets(url).fetch(manifest, tmp_path / "got", resume=resume)
    assert mine.read_bytes() == b"!"


def test_claims_that_are_not_numbers_are_ignored(base: tuple[StorageUrl, Path], tmp_path: Path) -> None:
    url, folder = base
    claims = folder / "claims" / "a"
    claims.mkdir(parents=True)
    for name in ("\u00b2.m9", "9" * 100 + ".m9"):
        (claims / name).write_text("")
    assert open_datasets(url).add("a", write_files(tmp_path / "a", x=b"1"), upload_id="m1", at=0.0).number == 1


def write_tree(top: Path, **contents: str) -> tuple[UploadSource, ...]:
    """Write files below ``top`` and return them as sources. ``__`` in a name means a slash."""
    for name, content in contents.items():
        path = top / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return find_sources([top], contents=True)


def fetch_files(datasets: Datasets, name: str, number: int | None, target: Path) -> dict[str, str]:
    datasets.fetch(datasets.manifest(name, number), target)
    return {str(path.relative_to(target)): path.read_text() for path in target.rglob("*") if path.is_file()}


def test_an_updated_version_has_the_old_and_the_new_files(base: tuple[StorageUrl, Path], tmp_path: Path) -> None:
    url, folder = base
    datasets = open_datasets(url)
    with pytest.raises(NotFound, match="no dataset `a`"):
        datasets.update("a", write_tree(tmp_path / "none", x="1"), upload_id="m0", at=0.0)
    first = datasets.add("a", write_tree(tmp_path / "one", x="1", y="1", d__e="1", f="1"), upload_id="m1", at=1.0)
    uploaded: list[tuple[int, int]] = []
    new = write_tree(tmp_path / "two", y="22", z="2", d="2", f__g="2")
    second = datasets.update("a", new, upload_id="m2", at=2.0, on_progress=lambda *moved: uploaded.append(moved))
    assert uploaded[-1] == (5, 5)  # no old files
    assert (second.number, second.created) == (first.number + 1, 2.0)
    # A file takes the place of a directory, and the other way round.
    assert fetch_files(datasets, "a", None, tmp_path / "got") == {"x": "1", "y": "22", "z": "2", "d": "2", "f/g": "2"}
    downloaded: list[tuple[int, int]] = []
    assert datasets.fetch(second, tmp_path / "again", on_progress=lambda *moved: downloaded.append(moved)).files == 5
    assert downloaded[-1] == (6, 6)
    assert sorted(downloaded) == downloaded
    # The same upload returns the same version. Another upload can extend an older version.
    assert datasets.update("a", new, upload_id="m2", at=9.0) == second
    third = datasets.update("a:1", write_tree(tmp_path / "three", only="3"), upload_id="m3", at=3.0)
    assert fetch_files(datasets, "a", third.number, tmp_path / "old") == {"x": "1", "y": "1", "d/e": "1", "f": "1", "only": "3"}
    with pytest.raises(NotFound, match="no version 7"):
        datasets.update("a:7", new, upload_id="m4", at=4.0)
    assert not list((folder / "turns").rglob("m*"))


def test_files_of_other_versions_stay_when_one_is_removed(base: tuple[StorageUrl, Path], tmp_path: Path) -> None:
    url, folder = base
    datasets = open_datasets(url)
    datasets.add("a", write_tree(tmp_path / "one", x="1", y="1"), upload_id="m1", at=0.0)
    datasets.update("a", write_tree(tmp_path / "two", y="2"), upload_id="m2", at=0.0)
    datasets.update("a", write_tree(tmp_path / "three", y="2", z="3"), upload_id="m3", at=0.0)  # y is stored only once

    def data() -> list[str]:
        return sorted(str(path.relative_to(folder / "data" / "a")) for path in (folder / "data").rglob("*") if path.is_file())

    datasets.remove("a", 1)
    assert data() == ["1/x", "2/y", "3/z"]
    assert fetch_files(datasets, "a", 3, tmp_path / "got") == {"x": "1", "y": "2", "z": "3"}
    datasets.remove("a", 3)
    assert data() == ["1/x", "2/y"]
    datasets.remove("a", 2)
    datasets.remove("a", 2)
    assert data() == []


def test_a_damaged_version_can_be_removed_and_others_only_after_it(base: tuple[StorageUrl, Path], tmp_path: Path) -> None:
    url, folder = base
    datasets = open_datasets(url)
    datasets.add("a", write_tree(tmp_path / "one", x="1", y="1"), upload_id="m1", at=0.0)
    datasets.update("a", write_tree(tmp_path / "two", y="2"), upload_id="m2", at=0.0)
    (folder / "versions" / "a" / "2.json").write_text("{")
    with pytest.raises(StorageError, match="is not a manifest of a dataset") as refused:
        datasets.remove("a", 1)
    assert refused.value.hint == "remove this version: distflow dataset delete a:2"
    assert fetch_files(datasets, "a", 1, tmp_path / "got") == {"x": "1", "y": "1"}
    datasets.remove("a", 2)
    assert {path.name for path in (folder / "data").rglob("*") if path.is_file()} == {"x", "y"}
    datasets.remove("a", 1)
    assert not [path for path in (folder / "data").rglob("*") if path.is_file()]


def test_concurrent_updates_lose_no_files(base: tuple[StorageUrl, Path], tmp_path: Path) -> None:
    url, _ = base
    open_datasets(url).add("a", write_tree(tmp_path / "first", x="1"), upload_id="m", at=0.0)
    made = [write_tree(tmp_path / f"of{number}", **{f"rank{number}": str(number)}) for number in range(4)]
    barrier = threading.Barrier(4)

    class Slow(Datasets):
        """Waits between reading the current state and writing the new one."""

        def _put(self, manifest: DatasetManifest) -> None:
            threading.Event().wait(0.3)
            super()._put(manifest)

    def update(number: int) -> int:
        datasets = Slow(open_store(url), url)
        barrier.wait(30)
        return datasets.update("a", made[number], upload_id=f"m{number}", at=0.0).number

    with ThreadPoolExecutor(4) as pool:
        numbers = list(pool.map(update, range(4)))
    assert sorted({1, *numbers}) == [one.number for one in open_datasets(url).versions("a")]
    assert len(set(numbers)) == 4
    names = {"x": "1", "rank0": "0", "rank1": "1", "rank2": "2", "rank3": "3"}
    assert fetch_files(open_datasets(url), "a", None, tmp_path / "got") == names


def test_an_abandoned_lock_expires(base: tuple[StorageUrl, Path], tmp_path: Path) -> None:
    url, folder = base
    if url.scheme != "file":
        pytest.skip("times of the server cannot be set")
    open_datasets(url).add("a", write_tree(tmp_path / "one", x="1"), upload_id="m1", at=0.0)
    lock = folder / "turns" / "a" / "gone"
    lock.parent.mkdir(parents=True)
    lock.touch()
    new = write_tree(tmp_path / "two", y="2")
    with ThreadPoolExecutor(1) as pool:
        made = pool.submit(open_datasets(url).update, "a", new, upload_id="m2", at=0.0)
        # It requests the lock, yields and requests it again. Each time, a file appears for a moment.
        changes: set[int] = set()

        def has_retried() -> bool:
            changes.add(lock.parent.stat().st_mtime_ns)
            return len(changes) > 3

        wait_until(has_retried, 30)
        assert not made.done()
        os.utime(lock, (1.0, 1.0))
        assert made.result(30).number == 2


@pytest.mark.parametrize("path", [".", "./.", ""])
def test_files_of_the_whole_output_are_stored_without_its_directory_name(path: str, tmp_path: Path) -> None:
    write_files(tmp_path / "scratch-0" / "sub", b=b"2")
    url = parse_url(f"file://{tmp_path}/store/sets")
    deliver(open_store(url), Delivery(url=str(url), dataset="d", paths=(path, "sub"), upload_id="m"), tmp_path / "scratch-0")
    assert [one.path for one in open_datasets(url).manifest("d").files] == ["sub/b"]
