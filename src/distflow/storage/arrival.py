"""What a task takes from a URL or a dataset, brought to a directory: of this machine, or on a node by the node itself."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, replace
from pathlib import Path

from distflow.documents.urls import parse_dataset, parse_url
from distflow.storage.base import Progress, Store, nothing_told
from distflow.storage.datasets import Datasets
from distflow.storage.downloading import Moved, download, find
from distflow.storage.failures import local_errors
from distflow.storage.trying import Patience
from distflow.storage.uploading import sources

__all__ = ["Arrival", "arrive", "look_up", "pinned"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """What is wanted."""

    url: str
    """With everything filled in."""
    regex: str = ""
    """Matched from the start of the relative path."""
    dataset: str = ""
    """Of those below the URL, with a version or without; empty: the URL itself is meant."""

    @property
    def words(self) -> str:
        """It, as it may be shown."""
        return f"dataset {self.dataset}" if self.dataset else str(parse_url(self.url))


def pinned(store: Store, arrival: Arrival, patience: Patience | None = None) -> Arrival:
    """Return the same with the version of its dataset: what several nodes fetch must not be several versions.

    Raises ``StorageError``, and ``NotFound`` where there is none.
    """
    name, number = parse_dataset(arrival.dataset) if arrival.dataset else ("", 0)
    if number is not None:
        return arrival
    number = Datasets(store, parse_url(arrival.url), patience).manifest(name).number
    return replace(arrival, dataset=f"{name}:{number}")


def look_up(store: Store, arrival: Arrival, patience: Patience | None = None) -> Moved:
    """Return what would be brought, of a dataset that version; a URL with nothing below it is an empty directory.

    Raises ``StorageError``.
    """
    url = parse_url(arrival.url)
    if arrival.dataset:
        name, number = parse_dataset(arrival.dataset)
        sizes = [one.size for one in Datasets(store, url, patience).manifest(name, number).matching(arrival.regex)]
    else:
        sizes = [one.entry.size for one in find(store, url, arrival.regex, may_be_empty=True, patience=patience)]
    return Moved(files=len(sizes), size=sum(sizes))


def arrive(
    store: Store, arrival: Arrival, files: Path, *, patience: Patience | None = None, told: Progress = nothing_told
) -> Moved:
    """Have exactly that in the directory ``files``; what an earlier try left there is gone on with.

    A dataset comes into a directory of its name. A URL with nothing below it is an empty directory. Raises ``StorageError``,
    and ``Halted`` when ``patience`` was called off.
    """
    with local_errors(files):
        files.mkdir(parents=True, exist_ok=True)
    moved = _bring(store, arrival, files, True, patience, told)
    if len(sources([files], contents=True)) > moved.files:
        # Left by an earlier try, and gone from the store since.
        with local_errors(files):
            shutil.rmtree(files)
            files.mkdir()
        moved = _bring(store, arrival, files, False, patience, told)
    return moved


def _bring(store: Store, arrival: Arrival, files: Path, resume: bool, patience: Patience | None, told: Progress) -> Moved:
    url = parse_url(arrival.url)
    if not arrival.dataset:
        return download(
            store, url, files, regex=arrival.regex, may_be_empty=True, resume=resume, patience=patience, told=told
        )  # fmt: skip
    name, number = parse_dataset(arrival.dataset)
    datasets = Datasets(store, url, patience)
    return datasets.fetch(datasets.manifest(name, number), files / name, regex=arrival.regex, resume=resume, told=told)
