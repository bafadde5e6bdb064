"""Data at a URL as one archive of this machine, and back: the form in which inputs and outputs of tasks travel.

The archive depends on names, contents and times only, and is named by its SHA-256, as the outputs that nodes pack are.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tarfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from distflow.errors import StorageError
from distflow.runtime.files.durable import publish
from distflow.runtime.files.unpacking import unpack
from distflow.runtime.wire import OpError
from distflow.storage.downloading import Moved
from distflow.storage.failures import local_errors
from distflow.storage.trying import Patience

__all__ = ["Archive", "make_archive", "unpacked"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Archive:
    """A tar in a folder of blobs."""

    digest: str
    """SHA-256; also its name there."""
    size: int
    """Bytes of the tar."""
    moved: Moved
    """What it was made of."""


def make_archive(fetch: Callable[[Path], Moved], blobs: Path, scratch: Path, patience: Patience) -> Archive:
    """Make a blob of what ``fetch`` brings into a directory.

    ``scratch`` is of this transfer alone: what it left there before is gone on with. Raises ``StorageError``, and ``Halted``
    when ``patience`` was called off.
    """
    files, part = scratch / "files", scratch / "archive"
    moved = fetch(files)
    with local_errors(part):
        try:
            digest, size = _pack(files, part, patience)
            with part.open("rb") as packed:
                publish(packed, str(blobs / digest))
        finally:
            part.unlink(missing_ok=True)
        shutil.rmtree(scratch)
    return Archive(digest=digest, size=size, moved=moved)


@contextmanager
def unpacked(archive: Path, scratch: Path) -> Iterator[Path]:
    """Unpack an archive into ``scratch`` for as long as the block runs. Raises ``StorageError``."""
    shutil.rmtree(scratch, ignore_errors=True)
    try:
        try:
            with local_errors(scratch):
                scratch.mkdir(parents=True)
                with archive.open("rb") as source:
                    unpack(source, os.fspath(scratch), compressed=False)
        except OpError as error:
            raise StorageError(f"the output cannot be unpacked: {error}") from error
        yield scratch
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


class _Summing:
    """A file that sums what is written to it."""

    def __init__(self, file: BinaryIO, patience: Patience) -> None:
        self._file = file
        self._patience = patience
        self.digest = hashlib.sha256()
        self.size = 0

    def write(self, data: bytes) -> int:
        self._patience.check()
        self.digest.update(data)
        self.size += len(data)
        return self._file.write(data)


def _pack(top: Path, path: Path, patience: Patience) -> tuple[str, int]:
    with path.open("wb") as file:
        sink = _Summing(file, patience)
        with tarfile.open(fileobj=sink, mode="w|", format=tarfile.PAX_FORMAT, bufsize=1 << 20) as tar:  # type: ignore[call-overload]
            for folder, folders, names in os.walk(top):
                folders.sort(key=os.fsencode)
                below = os.path.relpath(folder, top)
                if below != ".":
                    made = tarfile.TarInfo(below)
                    made.type, made.mode = tarfile.DIRTYPE, 0o700
                    tar.addfile(made)
                for name in sorted(names, key=os.fsencode):
                    member = tarfile.TarInfo(os.path.normpath(os.path.join(below, name)))
                    with open(os.path.join(folder, name), "rb") as source:
                        found = os.fstat(source.fileno())
                        member.size, member.mtime, member.mode = found.st_size, int(found.st_mtime), 0o600
                        tar.addfile(member, source)
    return sink.digest.hexdigest(), sink.size
