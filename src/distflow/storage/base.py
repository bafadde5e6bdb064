"""What a store is: objects by key, in one container. It knows nothing of files here, of patterns or of second tries."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Protocol

__all__ = ["PART_BYTES", "Entry", "Progress", "Sink", "Store", "is_part", "nothing_told", "open_source", "part_name"]

PART_BYTES = 16 << 20
"""Large objects are written in parts of this size, and read in pieces of it."""

Sink = Callable[[bytes], None]
Progress = Callable[[int, int], None]
"""Takes how many bytes are done, and how many there are."""


def part_name(mark: str) -> str:
    """Return the name of a file of this machine that is not whole yet; ``mark``: 16 hexadecimal digits."""
    return f".{mark}.distflow-part"


def is_part(name: str) -> bool:
    """Whether a file of this name is one that was not whole."""
    return re.fullmatch(r"\.[0-9a-f]{16}\.distflow-part", name) is not None


def open_source(path: Path) -> BinaryIO:
    """Open a file of this machine for reading, if it is not a symbolic link. Raises ``OSError``."""
    return os.fdopen(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW), "rb")


def nothing_told(done: int, total: int) -> None:
    """Be told how far it is, and do nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One object as its store describes it."""

    key: str
    """In its container; nothing is known of it: it may be meant to lead elsewhere."""
    size: int
    """Bytes."""
    mark: str = ""
    """Differs when the content differs (an ETag, a generation, a time); empty: the store has none."""
    md5: str = ""
    """Of the content, hexadecimal; ``<md5>-<parts>``: of the parts' sums, as S3 has it; empty: not known."""
    modified: float | None = None
    """Seconds since the epoch."""


class Store(Protocol):
    """One container, and who may use it.

    Contract, held by tests/integration/storage/test_stores.py for every implementation:

    1. ``find`` returns what has exactly this key, or lies below it; with an empty key everything. Nothing there: no entries.
       A container that is not there raises ``StorageMissing``.
    2. ``read`` gives the content from a byte on to ``sink``, in pieces.
    3. ``write`` puts a file there, whole or not at all, over what has the key already.
    4. ``delete`` of an object that is not there does nothing. It never follows a symbolic link below ``top``: a link itself is
       removed.
    5. All raise ``StorageError`` and its subclasses only, which name the object: ``StorageUnreachable`` when another try may
       help. What ``sink`` and ``told`` raise comes out as it is.
    6. All but ``close`` may be called from several threads at once.
    """

    def find(self, key: str) -> Sequence[Entry]:
        """Return what is at a key and below it."""

    def find_removable(self, key: str) -> Sequence[Entry]:
        """Return the objects that ``delete`` removes at a key and below it: a symbolic link itself, never its target."""

    def stat(self, key: str) -> Entry:
        """Return one object, with what its store can say of its content for certain. Raises ``StorageMissing``."""

    def read(self, entry: Entry, start: int, sink: Sink) -> None:
        """Give the content from ``start`` on to ``sink``."""

    def write(self, key: str, source: Path, told: Callable[[int], None]) -> None:
        """Put a file there; ``told`` hears how many more bytes are on their way."""

    def delete(self, key: str, *, top: str = "") -> None:
        """Remove an object. ``top``: the key of the directory that the user named, if ``key`` lies below it."""

    def check_readable(self, key: str) -> None:
        """Return when what is at the key, if anything, may be listed. Raises ``StorageError``."""

    def check_writable(self, key: str) -> None:
        """Return when objects can be written below the key, which leaves nothing there. Raises ``StorageError``."""

    def close(self) -> None:
        """Give back what the store holds."""
