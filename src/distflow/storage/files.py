"""Local files: find files to upload, compute checksums, name incomplete files, and use the file system as a store."""

from __future__ import annotations

import errno
import hashlib
import os
import posixpath
import re
import secrets
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from distflow.errors import StorageError, StorageMissing
from distflow.storage.base import PART_BYTES, Entry, Sink, compile_regex, part_size
from distflow.storage.failures import local_errors

__all__ = ["FolderStore", "UploadSource", "find_sources", "has_content", "is_part", "open_source", "part_name", "sha256"]


_PIECE_BYTES = 1 << 20
_COMMON_PART_SIZES = (PART_BYTES, 8 << 20, 5 << 20, 50 << 20, 64 << 20, 100 << 20)
"""Part sizes that programs commonly upload with. An object's checksum depends on its part size but does not state it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UploadSource:
    """A file to upload."""

    path: Path
    """With all links resolved. It is opened under this path, and a link that replaces it is not followed."""
    name: str
    """Its name relative to the URL."""
    size: int


def find_sources(
    paths: Iterable[Path], regex: str = "", *, contents: bool = False, only_files: bool = False
) -> tuple[UploadSource, ...]:
    """Return the files at and below some paths, if ``regex`` matches their names from the start.

    Names of files in a directory begin with the name of the directory, unless ``contents`` is set. Links are followed. Raises
    ``StorageError`` for two files with the same name, missing or unreadable files, links that form a loop, and paths that are
    neither files nor directories (``only_files`` skips these).
    """
    pattern = compile_regex(regex)
    found: dict[str, UploadSource] = {}
    for path in paths:
        with local_errors(path):
            # `.` and `..` are not names, so use the name of the directory that they mean.
            own = path.resolve().name if path.name in ("", "..") else path.name
            top = "" if contents and path.is_dir() else own
            for one in _walk(path, top, (), only_files=only_files):
                if pattern is not None and not pattern.match(one.name):
                    continue
                if one.name in found:
                    if found[one.name].path == one.path:
                        raise StorageError(f"{one.path} is given twice", hint="give it once")
                    raise StorageError(
                        f"{found[one.name].path} and {one.path} would both be uploaded as `{one.name}`",
                        hint="the second file would replace the first: rename one, or upload it to another URL or dataset",
                    )
                found[one.name] = one
    return tuple(found.values())


def _walk(path: Path, name: str, above: tuple[tuple[int, int], ...], *, only_files: bool) -> Iterator[UploadSource]:
    found = path.stat()
    if stat.S_ISREG(found.st_mode):
        if not os.access(path, os.R_OK):
            raise PermissionError(13, "Permission denied", os.fspath(path))
        yield UploadSource(path=path.resolve(), name=name or path.name, size=found.st_size)
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
    """Return whether this is the name of an incomplete file."""
    return re.fullmatch(r"\.[0-9a-f]{16}\.distflow-part", name) is not None


def has_content(path: Path, entry: Entry) -> bool | None:
    """Return whether a local file has the content of an entry.

    ``None``: the sizes are equal, but the contents cannot be compared. The entry has no checksum, or a checksum of parts that
    no known size of parts reproduces.
    """
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


_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


class FolderStore:
    """The whole file system as one storage container, like a bucket; keys are absolute paths without their first slash.

    Contract: ``storage.base.DataStore``.
    """

    def find(self, key: str) -> Sequence[Entry]:
        """Return the file, or all files below the directory, without the incomplete files of transfers.

        Links are followed, except links to a parent directory at or below the key, because that listing would never end.
        """
        path = _path(key)
        with local_errors(path):
            try:
                found = os.stat(path)
            except (FileNotFoundError, NotADirectoryError):
                return []
            if stat.S_ISDIR(found.st_mode):
                return list(_walk_files(path, (_identity(found),)))
            return [_entry(path, found)] if stat.S_ISREG(found.st_mode) else []

    def find_removable(self, key: str) -> Sequence[Entry]:
        """Return the file or link, or all complete files and links below the directory. No link is followed."""
        path = _path(key)
        with local_errors(path):
            try:
                found = os.lstat(path)
            except (FileNotFoundError, NotADirectoryError):
                return []
            if stat.S_ISDIR(found.st_mode):
                return list(_walk_removable(path))
            return [_entry(path, found)] if _is_removable(found) else []

    def stat(self, key: str) -> Entry:
        """Return the entry of one file. Raises ``StorageMissing``."""
        path = _path(key)
        with local_errors(path):
            try:
                found = os.stat(path)
            except (FileNotFoundError, NotADirectoryError):
                found = None
            if found is None or not stat.S_ISREG(found.st_mode):
                raise StorageMissing(f"{path}: there is no such file")
            return _entry(path, found)

    def read(self, entry: Entry, start: int, sink: Sink) -> None:
        """Pass the content from byte ``start`` to ``sink``."""
        path = _path(entry.key)
        with local_errors(path):
            source = open(path, "rb")
        with source:
            source.seek(start)
            while True:
                with local_errors(path):
                    piece = source.read(_PIECE_BYTES)
                if not piece:
                    return
                sink(piece)

    def write(self, key: str, source: Path, on_bytes: Callable[[int], None]) -> None:
        """Copy a file, under another name until it is complete."""
        path = Path(_path(key))
        with local_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            part = path.with_name(part_name(secrets.token_hex(8)))
            try:
                with open_source(source) as original, part.open("xb") as target:
                    while piece := original.read(_PIECE_BYTES):
                        target.write(piece)
                        on_bytes(len(piece))
                shutil.copymode(source, part)
                os.replace(part, path)
            except BaseException:
                part.unlink(missing_ok=True)
                raise

    def delete(self, key: str, *, top: str = "") -> None:
        """Remove a file or a link, but no directory. No link between ``top`` and ``key`` is followed."""
        path = _path(key)
        folder = _path(top if key.startswith(f"{top}/") else posixpath.dirname(key))
        *parents, name = posixpath.relpath(path, folder).split("/")
        with local_errors(path), suppress(FileNotFoundError):
            directory = os.open(folder, _DIRECTORY)
            try:
                for parent in parents:
                    outer, directory = directory, _open_real_directory(parent, directory, path)
                    os.close(outer)
                os.unlink(name, dir_fd=directory)
            finally:
                os.close(directory)

    def check_readable(self, key: str) -> None:
        """List the objects at the key."""
        self.find(key)

    def check_writable(self, key: str) -> None:
        """Create a file in the nearest existing directory, and remove it."""
        path = Path(_path(key))
        with local_errors(path):
            while not _is_directory(path):
                path = path.parent
            probe = path / part_name(secrets.token_hex(8))
            probe.touch(exist_ok=False)
            probe.unlink()

    def close(self) -> None:
        """Do nothing: a directory needs no connection."""


def _path(key: str) -> str:
    return f"/{key}"


def _is_directory(path: Path) -> bool:
    """Return whether a directory exists. Raises ``StorageError`` for another kind of file, and ``OSError``."""
    try:
        mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return False
    if not stat.S_ISDIR(mode):
        raise StorageError(f"{path} is not a directory", hint="choose another URL, or remove that file")
    return True


def _identity(found: os.stat_result) -> tuple[int, int]:
    return found.st_dev, found.st_ino


def _walk_files(top: str, above: tuple[tuple[int, int], ...]) -> Iterator[Entry]:
    for item in sorted(os.scandir(top), key=lambda one: os.fsencode(one.name)):
        try:
            found = item.stat()
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
                raise
            continue  # a link to nothing or to itself, or a file that was removed during the listing
        if stat.S_ISDIR(found.st_mode):
            if _identity(found) not in above:
                yield from _walk_files(item.path, (*above, _identity(found)))
        elif stat.S_ISREG(found.st_mode) and not is_part(item.name):
            yield _entry(item.path, found)


def _walk_removable(top: str) -> Iterator[Entry]:
    for item in sorted(os.scandir(top), key=lambda one: os.fsencode(one.name)):
        found = item.stat(follow_symlinks=False)
        if stat.S_ISDIR(found.st_mode):
            yield from _walk_removable(item.path)
        elif _is_removable(found) and not is_part(item.name):
            yield _entry(item.path, found)


def _open_real_directory(name: str, inside: int, path: str) -> int:
    try:
        return os.open(name, _DIRECTORY | os.O_NOFOLLOW, dir_fd=inside)
    except NotADirectoryError:
        what = f"cannot remove {path}: a link or a file has replaced the directory `{name}`"
        raise StorageError(what, hint="find out who replaced it, then run the command again") from None


def _is_removable(found: os.stat_result) -> bool:
    return stat.S_ISREG(found.st_mode) or stat.S_ISLNK(found.st_mode)


def _entry(path: str, found: os.stat_result) -> Entry:
    return Entry(
        key=path.lstrip("/"), size=found.st_size, tag=f"{found.st_mtime_ns}-{found.st_size}", modified=found.st_mtime
    )  # fmt: skip
