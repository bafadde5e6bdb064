"""Local files of a transfer: which files to upload, their checksums, and the names of incomplete files."""

from __future__ import annotations

import hashlib
import os
import re
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from distflow.errors import StorageError
from distflow.storage.base import PART_BYTES, Entry, compile_regex, part_size
from distflow.storage.failures import local_errors

__all__ = ["Source", "find_sources", "has_content", "is_part", "open_source", "part_name", "sha256"]

_PIECE_BYTES = 1 << 20
_COMMON_PART_SIZES = (PART_BYTES, 8 << 20, 5 << 20, 50 << 20, 64 << 20, 100 << 20)
"""Part sizes that programs commonly upload with; the checksum of an object does not include its part size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A file to upload."""

    path: Path
    """With all links resolved. It is opened under this path, and a link that replaces it is not followed."""
    name: str
    """Its name relative to the URL."""
    size: int


def find_sources(
    paths: Iterable[Path], regex: str = "", *, contents: bool = False, only_files: bool = False
) -> tuple[Source, ...]:
    """Return the files at and below some paths whose names ``regex`` matches from their start.

    Names of files in a directory begin with the name of the directory; not with ``contents``. Links are followed. Raises
    ``StorageError`` for two files with the same name, for unreadable files, for links that form a loop, and for anything that
    is neither a file nor a directory (``only_files`` skips these).
    """
    pattern = compile_regex(regex)
    found: dict[str, Source] = {}
    for path in paths:
        with local_errors(path):
            # `.` and `..` stand for directories that have names.
            own = path.resolve().name if path.name in ("", "..") else path.name
            top = "" if contents and path.is_dir() else own
            for one in _walk(path, top, (), only_files=only_files):
                if pattern is not None and not pattern.match(one.name):
                    continue
                if one.name in found:
                    raise StorageError(
                        f"{found[one.name].path} and {one.path} would both be uploaded as `{one.name}`",
                        hint="upload them separately",
                    )
                found[one.name] = one
    return tuple(found.values())


def _walk(path: Path, name: str, above: tuple[tuple[int, int], ...], *, only_files: bool) -> Iterator[Source]:
    found = path.stat()
    if stat.S_ISREG(found.st_mode):
        if not os.access(path, os.R_OK):
            raise PermissionError(13, "Permission denied", os.fspath(path))
        yield Source(path=path.resolve(), name=name or path.name, size=found.st_size)
    elif stat.S_ISDIR(found.st_mode):
        identity = (found.st_dev, found.st_ino)
        if identity in above:
            raise StorageError(f"{path} leads back to a directory above it", hint="remove the link")
        for item in sorted(path.iterdir(), key=lambda one: os.fsencode(one.name)):
            below = f"{name}/{item.name}" if name else item.name
            yield from _walk(item, below, (*above, identity), only_files=only_files)
    elif not only_files:
        raise StorageError(f"{path} is neither a file nor a directory", hint="leave it out")


def open_source(path: Path) -> BinaryIO:
    """Open a local file for reading, unless it is a symbolic link. Raises ``OSError``."""
    return os.fdopen(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW), "rb")


def part_name(token: str) -> str:
    """Return the name of an incomplete file; ``token``: 16 hexadecimal digits."""
    return f".{token}.distflow-part"


def is_part(name: str) -> bool:
    """Whether this is the name of an incomplete file."""
    return re.fullmatch(r"\.[0-9a-f]{16}\.distflow-part", name) is not None


def has_content(path: Path, entry: Entry) -> bool | None:
    """Return whether a local file has the content of an entry; ``None``: the entry has no usable checksum."""
    with local_errors(path):
        size = path.stat().st_size
        if size != entry.size:
            return False
        if not entry.md5:
            return None
        digest, _, parts = entry.md5.partition("-")
        if not parts:
            return _md5(path) == digest
        sizes = {one for one in (part_size(size), *_COMMON_PART_SIZES) if -(-size // one) == int(parts)}
        if any(_md5_of_parts(path, one) == digest for one in sorted(sizes)):
            return True
    return None


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file, hexadecimal. Raises ``StorageError``."""
    found = hashlib.sha256()
    with local_errors(path), path.open("rb") as file:
        while piece := file.read(_PIECE_BYTES):
            found.update(piece)
    return found.hexdigest()


def _md5(path: Path) -> str:
    found = hashlib.md5(usedforsecurity=False)
    with path.open("rb") as file:
        while piece := file.read(_PIECE_BYTES):
            found.update(piece)
    return found.hexdigest()


def _md5_of_parts(path: Path, size: int) -> str:
    found = hashlib.md5(usedforsecurity=False)
    with path.open("rb") as file:
        while piece := file.read(size):
            found.update(hashlib.md5(piece, usedforsecurity=False).digest())
    return found.hexdigest()
