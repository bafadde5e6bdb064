"""Manifests of datasets that someone with access to the store has changed: they are refused, or harmless."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distflow.documents.urls import parse_url
from distflow.errors import StorageError
from distflow.storage.datasets import Datasets
from distflow.storage.failures import Retries
from distflow.storage.files import find_sources
from distflow.storage.stores import open_store


class Dataset:
    """An uploaded dataset with two versions, the second based on the first, and a file that no fetch may change."""

    def __init__(self, top: Path) -> None:
        self.top = top
        self.url = parse_url(f"file://{top}/store")
        self.victim = top / "home" / "victim"
        self.victim.parent.mkdir()
        self.victim.write_text("mine")
        for number, name in enumerate(("a", "sub/b"), 1):
            file = top / f"source{number}" / name
            file.parent.mkdir(parents=True)
            file.write_text(name)
        self.datasets().add("m", find_sources([top / "source1"], contents=True), upload_id="m1", at=1.0)
        self.datasets().update("m", find_sources([top / "source2"], contents=True), upload_id="m2", at=2.0)
        self.path = top / "store" / "versions" / "m" / "2.json"
        self.text = self.path.read_text()

    def datasets(self) -> Datasets:
        return Datasets(open_store(self.url), self.url, Retries(pauses_s=()))

    def fetch(self, manifest: bytes) -> None:
        """Fetch the files of a manifest. Check that nothing outside of the target directory changes, even if this fails."""
        self.path.write_bytes(manifest)
        target = self.top / "home" / "deep" / "got"
        with suppress(StorageError):
            datasets = self.datasets()
            found = datasets.manifest("m", 2)
            assert all(not one.path.startswith("/") and ".." not in one.path.split("/") for one in found.files)
            assert 0 <= found.created < 1e12
            datasets.fetch(found, target)
        assert self.victim.read_text() == "mine"
        outside = [path for path in (self.top / "home").rglob("*") if target not in (path, *path.parents)]
        assert {path.name for path in outside} <= {"victim", "deep"}


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return Dataset(tmp_path_factory.mktemp("dataset"))


def paths_in(document: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    items = document.items() if isinstance(document, Mapping) else enumerate(document) if isinstance(document, list) else ()
    for key, value in items:
        yield (*path, key)
        yield from paths_in(value, (*path, key))


TEXTS = ["", "..", "../../victim", "/etc/passwd", "a/../../victim", "a\0", "\ud800", "x" * 300, "a", "sub", "0" * 64]
OTHERS: list[object] = [-1, 0, 2, 10**18, 10**40, 1e300, True, None, {}, []]
hostile: st.SearchStrategy[object] = st.one_of(st.sampled_from([*TEXTS, *OTHERS]), st.text(max_size=8), st.integers())


@given(data=st.data())
def test_a_manifest_with_changed_fields_is_harmless(dataset: Dataset, data: st.DataObject) -> None:
    document = json.loads(dataset.text)
    paths = sorted(paths_in(document), key=str)
    changed = copy.deepcopy(document)
    for path, value in data.draw(st.lists(st.tuples(st.sampled_from(paths), hostile), min_size=1, max_size=4)):
        with suppress(KeyError, IndexError, TypeError):
            parent = changed
            for part in path[:-1]:
                parent = parent[part]
            parent[path[-1]] = copy.deepcopy(value)  # all draws share the mappings and lists of `OTHERS`
    dataset.fetch(json.dumps(changed).encode())


@given(
    changes=st.lists(st.tuples(st.integers(0, 4095), st.integers(0, 255)), max_size=6), length=st.integers(0, 4096),
    nested=st.integers(0, 20_000),
)  # fmt: skip
def test_a_manifest_with_changed_bytes_is_harmless(
    dataset: Dataset, changes: list[tuple[int, int]], length: int, nested: int
) -> None:
    content = bytearray(dataset.text.encode())
    for at, value in changes:
        content[at % len(content)] = value
    dataset.fetch(b"[" * (nested if nested % 7 == 0 else 0) + bytes(content[:length]))


def test_an_unchanged_manifest_is_fetched(dataset: Dataset) -> None:
    dataset.fetch(dataset.text.encode())
    target = dataset.top / "home" / "deep" / "got"
    assert ((target / "a").read_text(), (target / "sub" / "b").read_text()) == ("a", "sub/b")
