"""Sums of files: whether what lies here is what the store says it has."""

from __future__ import annotations

import hashlib
from pathlib import Path

from distflow.storage.base import PART_BYTES, Entry
from distflow.storage.failures import local_errors
from distflow.storage.objects import part_size

__all__ = ["is_equal", "sha256"]

_AT_ONCE = 1 << 20
_GUESSES = (PART_BYTES, 8 << 20, 5 << 20, 50 << 20, 64 << 20, 100 << 20)
"""Sizes of parts that programs write with; the parts' sums say nothing of their size."""


def is_equal(path: Path, entry: Entry) -> bool | None:
    """Return whether a file has the content of an entry; ``None``: its store does not tell enough."""
    with local_errors(path):
        size = path.stat().st_size
        if size != entry.size:
            return False
        if not entry.md5:
            return None
        digest, _, parts = entry.md5.partition("-")
        if not parts:
            return _md5(path) == digest
        sizes = {guess for guess in (part_size(size), *_GUESSES) if -(-size // guess) == int(parts)}
        if any(_md5_of_parts(path, one) == digest for one in sorted(sizes)):
            return True
    return None


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file, hexadecimal. Raises ``StorageError``."""
    found = hashlib.sha256()
    with local_errors(path), path.open("rb") as file:
        while piece := file.read(_AT_ONCE):
            found.update(piece)
    return found.hexdigest()


def _md5(path: Path) -> str:
    found = hashlib.md5(usedforsecurity=False)
    with path.open("rb") as file:
        while piece := file.read(_AT_ONCE):
            found.update(piece)
    return found.hexdigest()


def _md5_of_parts(path: Path, size: int) -> str:
    found = hashlib.md5(usedforsecurity=False)
    with path.open("rb") as file:
        while piece := file.read(size):
            found.update(hashlib.md5(piece, usedforsecurity=False).digest())
    return found.hexdigest()
