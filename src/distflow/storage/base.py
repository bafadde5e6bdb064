"""The interface of stores, and the selection of objects by a URL. Keys that a store returns are not trusted."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from distflow.documents.urls import StorageUrl
from distflow.errors import InputError, StorageError, StorageMissing

__all__ = [
    "PART_BYTES",
    "DataStore",
    "Entry",
    "Progress",
    "SelectedObject",
    "Sink",
    "check_names",
    "compile_regex",
    "ignore_progress",
    "part_size",
    "select",
    "select_existing",
    "why_not_a_file",
]  # fmt: skip

PART_BYTES = 16 << 20
"""The bytes that ``ObjectStore`` reads at once, and the smallest size of the parts in which it writes large objects of S3."""
_MOST_PARTS = 9000
"""S3 allows 10 000 parts for one object."""
_LONGEST_NAME = 255

Sink = Callable[[bytes], None]
Progress = Callable[[int, int], None]
"""Takes the number of transferred bytes, and the total number of bytes."""


def ignore_progress(done: int, total: int) -> None:
    """Ignore a report of progress."""


def part_size(size: int) -> int:
    """Return the bytes of one part for an object of ``size`` bytes that is written in parts."""
    return max(PART_BYTES, -(-size // _MOST_PARTS))


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One object as its store describes it."""

    key: str
    """Its key in the container. Not trusted: it may try to escape from the target directory."""
    size: int
    """Bytes."""
    tag: str = ""
    """A value that changes with the content (an ETag, a generation, a time). Empty if the store has none."""
    md5: str = ""
    """MD5 of the content, hexadecimal, or as in S3 the MD5 of the MD5s of its parts (``<md5>-<parts>``). Empty if unknown."""
    modified: float | None = None
    """Seconds since the epoch."""


class DataStore(Protocol):
    """One container, accessed with one set of credentials. Its callers select objects and retry requests.

    Contract, which tests/integration/storage/test_stores.py checks for ``file``, ``s3`` and ``sftp``:

    1. ``find`` returns the object with exactly this key and all objects below it; all objects for an empty key. The result may
       be empty. ``find`` raises ``StorageMissing`` when the container does not exist.
    2. ``read`` passes the content from a byte offset to ``sink``, in pieces.
    3. ``write`` stores a whole file or nothing, and replaces an existing object with the key.
    4. ``delete`` does nothing when the object does not exist. It removes a symbolic link at the key itself, never its target.
       It refuses a key if one of the key's directories below ``top`` is a link.
    5. All methods raise only ``StorageError`` and its subclasses, which name the object: ``StorageUnreachable`` if a retry may
       help. A read-only store raises ``InputError`` instead in ``find_removable`` and in methods that write or delete.
       Exceptions from ``sink`` pass through unchanged, and so do ``TransferCanceled`` and errors of distflow from ``on_bytes``.
    6. All methods but ``close`` may be called from several threads at once.
    """

    def find(self, key: str) -> Sequence[Entry]:
        """Return the objects at a key and below it."""

    def find_removable(self, key: str) -> Sequence[Entry]:
        """Return the objects that ``delete`` removes at a key and below it: a symbolic link itself, never its target."""

    def stat(self, key: str) -> Entry:
        """Return one object, with a checksum only if the store is certain of it. Raises ``StorageMissing``."""

    def read(self, entry: Entry, start: int, sink: Sink) -> None:
        """Pass the content from byte ``start`` to ``sink``."""

    def write(self, key: str, source: Path, on_bytes: Callable[[int], None]) -> None:
        """Upload a file; ``on_bytes`` takes the number of bytes that were sent since its last call."""

    def delete(self, key: str, *, top: str = "") -> None:
        """Remove an object. ``top``: the key of the directory that the user named, if ``key`` lies below it."""

    def check_readable(self, key: str) -> None:
        """Check that objects at the key may be listed. Raises ``StorageError`` if not."""

    def check_writable(self, key: str) -> None:
        """Check that objects can be written below the key, and leave no object. Raises ``StorageError`` if not."""

    def close(self) -> None:
        """Release connections."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectedObject:
    """An object that a URL selects."""

    entry: Entry
    name: str
    """Its path relative to the URL; for a URL that names one object, the last part of the URL."""


def compile_regex(regex: str) -> re.Pattern[str] | None:
    """Return the pattern; ``None`` for an empty ``regex``, which matches everything. Raises ``InputError``."""
    try:
        return re.compile(regex) if regex else None
    except (re.error, OverflowError, RecursionError) as error:
        hint = r"write a Python regular expression such as `.*\.pt`; it is matched from the start of the relative path"
        raise InputError(f"`{regex}` is not a valid regular expression: {error}", hint=hint) from error


def select(url: StorageUrl, entries: Iterable[Entry], regex: str = "") -> tuple[SelectedObject, ...]:
    """Return the objects that a URL selects from the entries of its store, ordered by name.

    If the URL does not end with a slash and an object has exactly its key, only that object is selected. Otherwise, all objects
    below the URL are selected. ``regex`` is matched from the start of the name. Folder markers (keys that end with a slash) are
    left out.
    """
    pattern = compile_regex(regex)
    found = list(entries)
    exact = [entry for entry in found if entry.key == url.key and url.key and not url.is_folder]
    top = f"{url.key}/" if url.key else ""
    named = [(entry, url.name) for entry in exact] or [
        (entry, entry.key.removeprefix(top)) for entry in found if entry.key.startswith(top) and not entry.key.endswith("/")
    ]
    selected = [SelectedObject(entry=entry, name=name) for entry, name in named if pattern is None or pattern.match(name)]
    return tuple(sorted(selected, key=lambda one: os.fsencode(one.name)))


def select_existing(url: StorageUrl, entries: Iterable[Entry], regex: str = "") -> tuple[SelectedObject, ...]:
    """Return the result of ``select``. Raises ``StorageMissing`` when no object is at or below the URL."""
    found = list(entries)
    selected = select(url, found, regex)
    if not selected and not select(url, found):
        raise StorageMissing(f"there is nothing at {url}", hint="`distflow data list` shows the existing objects")
    return selected


def check_names(url: StorageUrl, objects: Sequence[SelectedObject]) -> None:
    """Raise ``StorageError`` if one directory cannot contain files with all of these names."""
    names = {one.name for one in objects}
    for one in objects:
        why = why_not_a_file(one.name, names)
        if why:
            raise StorageError(
                f"{url.shown(one.entry.key)!r} cannot be stored as a file: {why}",
                hint="rename it in the store, or leave it out with a regex",
            )


def why_not_a_file(name: str, names: Container[str]) -> str:
    """Return why an object cannot be a file with this name in a directory that gets all of ``names``; empty when it can."""
    parts = name.split("/")
    if name.startswith("/") or ".." in parts:
        return "its name leads out of the directory"
    if "" in parts or "." in parts:
        return "its name has a part that is empty or `.`"
    if "\0" in name:
        return "its name contains a null byte"
    if any(len(os.fsencode(part)) > _LONGEST_NAME for part in parts):
        return f"a part of its name is longer than {_LONGEST_NAME} bytes"
    above = next(("/".join(parts[:end]) for end in range(1, len(parts)) if "/".join(parts[:end]) in names), None)
    return f"`{above}` would have to be a file and a directory" if above is not None else ""
