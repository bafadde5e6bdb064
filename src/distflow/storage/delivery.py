"""What a task wrote, brought to where its spec wants it: below a URL, or into a new version of a dataset."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from distflow.documents.urls import parse_dataset, parse_url
from distflow.errors import StorageError
from distflow.storage.base import Progress, Store, nothing_told
from distflow.storage.datasets import Datasets
from distflow.storage.trying import Patience
from distflow.storage.uploading import sources, upload

__all__ = ["Delivered", "Delivery", "NotDirect", "deliver"]


class NotDirect(Exception):
    """A node cannot bring an output to its store by itself; raised with the reason, so that this machine relays it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivery:
    """What goes where."""

    url: str
    """With everything filled in."""
    regex: str = ""
    """Matched from the start of the relative path."""
    dataset: str = ""
    """Of those below the URL; empty: the URL itself is meant."""
    paths: Sequence[str] = ()
    """Into a dataset: what of the output; none: all of it."""
    is_update: bool = False
    """Into a dataset: over what a version holds, the named one or the latest."""
    mark: str = ""
    """Into a dataset: the same for whoever repeats it."""
    at: float = 0.0
    """Into a dataset: when its version was made."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivered:
    """What is there now."""

    words: str
    """Where, as it may be shown; a dataset with its version."""
    files: int
    size: int
    """Bytes of the files."""


def deliver(
    store: Store, delivery: Delivery, top: Path, *, patience: Patience | None = None, told: Progress = nothing_told
) -> Delivered:
    """Write what a directory holds; of what is there with the same content nothing is sent again.

    Raises ``StorageError``, and ``Halted`` when ``patience`` was called off.
    """
    url = parse_url(delivery.url, writes=True)
    if not delivery.dataset:
        files = sources([top], delivery.regex, contents=True, only_files=True)
        moved = upload(store, url, files, patience=patience, told=told)
        return Delivered(words=str(url), files=moved.files, size=moved.size)
    for path in delivery.paths:
        if not (top / path).exists():
            raise StorageError(f"dataset {delivery.dataset}: there is no `{path}` in it")
    # The directory itself has a name that says nothing to anybody: `.` means what it holds.
    is_whole = not delivery.paths or any(top / path == top for path in delivery.paths)
    tops = [top] if is_whole else [top / path for path in delivery.paths]
    files = sources(tops, delivery.regex, contents=is_whole, only_files=True)
    if not files:
        return Delivered(words=f"dataset {delivery.dataset}", files=0, size=0)
    name, _ = parse_dataset(delivery.dataset)
    datasets = Datasets(store, url, patience)
    if delivery.is_update:
        made = datasets.update(delivery.dataset, files, mark=delivery.mark, at=delivery.at, told=told)
    else:
        made = datasets.add(name, files, mark=delivery.mark, at=delivery.at, told=told)
    return Delivered(words=f"dataset {name}:{made.number}", files=len(made.files), size=made.size)
