"""Local directories as a store, for ``file://`` and plain paths."""

from __future__ import annotations

import os
import posixpath
import secrets
import shutil
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from distflow.errors import StorageError, StorageMissing
from distflow.storage.base import Entry, Sink
from distflow.storage.failures import local_errors
from distflow.storage.files import is_part, open_source, part_name

__all__ = ["FolderStore"]

_PIECE_BYTES = 1 << 20
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


class FolderStore:
    """The whole file system as one container; keys are absolute paths without their first slash.

    Contract: ``storage.base.Store``.
    """

    def find(self, key: str) -> Sequence[Entry]:
        """Return the file, or all files below the directory. Links are followed, except to a directory above them."""
        path = _path(key)
        with local_errors(path):
            try:
                found = os.stat(path)
            except (FileNotFoundError, NotADirectoryError):
                return []
            if stat.S_ISDIR(found.st_mode):
                return list(_walk(path, (_identity(found),)))
            return [_entry(path, found)] if stat.S_ISREG(found.st_mode) else []

    def find_removable(self, key: str) -> Sequence[Entry]:
        """Return the file or link, or all files and links below the directory. No link is followed."""
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
        """Return one file."""
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
                with open_source(source) as given, part.open("xb") as target:
                    while piece := given.read(_PIECE_BYTES):
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
        while not path.is_dir() and path != path.parent:
            if path.exists():
                raise StorageError(f"{path} is not a directory")
            path = path.parent
        with local_errors(path):
            probe = path / part_name(secrets.token_hex(8))
            probe.touch(exist_ok=False)
            probe.unlink()

    def close(self) -> None:
        """Do nothing: a directory needs no connection."""


def _path(key: str) -> str:
    return f"/{key}"


def _identity(found: os.stat_result) -> tuple[int, int]:
    return found.st_dev, found.st_ino


def _walk(top: str, above: tuple[tuple[int, int], ...]) -> Iterator[Entry]:
    for item in sorted(os.scandir(top), key=lambda one: os.fsencode(one.name)):
        try:
            found = item.stat()
        except FileNotFoundError:
            continue  # a broken link, or a file that was removed during the listing
        if stat.S_ISDIR(found.st_mode):
            if _identity(found) not in above:
                yield from _walk(item.path, (*above, _identity(found)))
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
        raise StorageError(
            f"{path} is not removed: `{name}` in its path is no longer a directory", hint="run the command again"
        ) from None


def _is_removable(found: os.stat_result) -> bool:
    return stat.S_ISREG(found.st_mode) or stat.S_ISLNK(found.st_mode)


def _entry(path: str, found: os.stat_result) -> Entry:
    return Entry(
        key=path.lstrip("/"), size=found.st_size, tag=f"{found.st_mtime_ns}-{found.st_size}", modified=found.st_mtime
    )  # fmt: skip
