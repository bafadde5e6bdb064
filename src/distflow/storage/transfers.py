"""Transfers between local files and a store: find, download, upload and delete, several objects at once.

A downloaded file gets its name only when it is complete and has the right checksum, if one is known. If the store has
checksums, an upload skips files whose content is already at the destination. A download with ``resume`` keeps complete files
if the store or the caller's ``checksums`` can prove that they are complete.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import stat
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import NoReturn, TypeVar

from distflow.documents.urls import StorageUrl
from distflow.errors import StorageError, StorageUnreachable
from distflow.runtime.files.safe_files import path_inside
from distflow.runtime.files.unpacking import file_time
from distflow.runtime.wire import OpError
from distflow.storage.base import (
    DataStore,
    Entry,
    Progress,
    SelectedObject,
    check_names,
    ignore_progress,
    select,
    select_existing,
)
from distflow.storage.failures import Retries, TransferCanceled, local_errors
from distflow.storage.files import UploadSource, has_content, part_name, sha256

__all__ = ["TransferResult", "delete", "download", "find", "find_removable", "upload"]

_T = TypeVar("_T")
_R = TypeVar("_R")
_CHANGED_HINT = "upload it again when no process writes to it"


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferResult:
    """The result of a transfer."""

    files: int = 0
    """The number of files that are now at their destination."""
    size: int = 0
    """The size of these files in bytes."""
    skipped: int = 0
    """The number of these files that were not transferred, because they were already complete."""
    skipped_size: int = 0
    """The size of the skipped files in bytes."""


def find(
    store: DataStore, url: StorageUrl, regex: str = "", *, may_be_empty: bool = False, retries: Retries | None = None
) -> tuple[SelectedObject, ...]:
    """Return the objects that a URL selects and whose relative paths ``regex`` matches.

    Raises ``StorageMissing`` when no object is at or below the URL, unless ``may_be_empty``.
    """
    found = (retries or Retries()).call(lambda: store.find(url.key))
    return select(url, found, regex) if may_be_empty else select_existing(url, found, regex)


def find_removable(
    store: DataStore, url: StorageUrl, regex: str = "", *, retries: Retries | None = None
) -> tuple[SelectedObject, ...]:
    """Return the objects that ``delete`` removes at a URL and whose relative paths ``regex`` matches.

    Raises ``StorageMissing`` when no object is at or below the URL.
    """
    return select_existing(url, (retries or Retries()).call(lambda: store.find_removable(url.key)), regex)


def delete(
    store: DataStore, url: StorageUrl, objects: Sequence[SelectedObject], *, at_once: int = 8, retries: Retries | None = None
) -> int:
    """Remove objects that ``find_removable`` found at a URL, and return their number.

    Raises ``StorageError`` for the first object that cannot be removed.
    """
    retries = retries or Retries()

    def remove(one: SelectedObject) -> None:
        retries.call(lambda: store.delete(one.entry.key, top=url.key))

    return len(_for_all(objects, remove, at_once, retries))


# -- downloads --------------------------------------------------------------------------------------------------------


def download(
    store: DataStore,
    url: StorageUrl,
    target: Path,
    *,
    regex: str = "",
    checksums: Mapping[str, str] | None = None,
    may_be_empty: bool = False,
    resume: bool = False,
    at_once: int = 8,
    retries: Retries | None = None,
    on_progress: Progress = ignore_progress,
) -> TransferResult:
    """Download the objects that a URL selects to the directory ``target``.

    With ``checksums`` (SHA-256 by name), only these names are downloaded, all of them must exist, and a file gets its name only
    when its content has that checksum. With ``resume``, files that have the right size and checksum are kept. An incomplete
    file is continued even without ``resume``, if the store's tag shows that the content is still the same. Files get the
    modification times of the store, if it has any.

    Raises ``StorageError`` and ``TransferCanceled``.
    """
    retries = retries or Retries()
    found = find(store, url, regex, may_be_empty=may_be_empty, retries=retries)
    objects = tuple(one for one in found if checksums is None or one.name in checksums)
    missing = sorted(set(checksums or ()) - {one.name for one in objects})
    if missing:
        message = f"{url.below(missing[0])} is missing from the store: a file of this dataset version was removed"
        raise StorageError(message, hint="upload its files as a new version")
    check_names(url, objects)
    counter = _ByteCounter(sum(one.entry.size for one in objects), on_progress)
    with local_errors(target):
        target.mkdir(parents=True, exist_ok=True)
        paths = _local_paths(target, objects)

    downloads = {
        one.name: _Download(store, url, one.entry, paths[one.name], (checksums or {}).get(one.name, ""), retries, counter)
        for one in objects
    }

    def fetch(one: SelectedObject) -> bool:
        """Return whether the file was already complete."""
        if resume and downloads[one.name].is_complete():
            counter.add(one.entry.size)
            return True
        downloads[one.name].run()
        return False

    try:
        were_complete = _for_all(objects, fetch, at_once, retries)
    except StorageError as error:
        if isinstance(error.__cause__, OSError):
            # Incomplete files must not keep a full disk full.
            for one in downloads.values():
                one.discard()
        raise
    return _result([one.entry.size for one in objects], were_complete)


def _result(sizes: Sequence[int], were_complete: Sequence[bool]) -> TransferResult:
    skipped = list(itertools.compress(sizes, were_complete))
    return TransferResult(files=len(sizes), size=sum(sizes), skipped=len(skipped), skipped_size=sum(skipped))


def _local_paths(target: Path, objects: Sequence[SelectedObject]) -> dict[str, Path]:
    """Create each file's directory, and return the files' paths. Raises ``StorageError`` if a link leads out of ``target``."""
    paths = {}
    known: set[str] = set()
    for one in objects:
        try:
            paths[one.name] = Path(path_inside(os.fspath(target), one.name, known))
        except OpError as error:
            folders = [target / folder for folder in reversed(PurePosixPath(one.name).parents)]
            link = next((folder for folder in folders if not folder.resolve().is_relative_to(target.resolve())), folders[-1])
            raise StorageError(
                f"{one.name!r} cannot be stored below {target}, because {link} is a link that leads out",
                hint="remove this link, or choose another directory",
            ) from error
        paths[one.name].parent.mkdir(parents=True, exist_ok=True)
    return paths


class _Download:
    """The download of one object to a file."""

    def __init__(
        self, store: DataStore, url: StorageUrl, entry: Entry, path: Path, sha256: str, retries: Retries, counter: _ByteCounter
    ) -> None:
        self._store = store
        self._shown = url.shown(entry.key)
        self._entry = entry
        self._path = path
        self._sha256 = sha256
        # The name of the incomplete file depends on the content's tag, so that only the same content is continued.
        token = hashlib.sha256(f"{self._shown}\0{path.name}\0{entry.tag}\0{entry.size}".encode("utf-8", "surrogateescape"))
        self._part = path.with_name(part_name(token.hexdigest()[:16]))
        self._retries = retries
        self._counter = counter
        self._counted = 0
        """The bytes of this download that the counter includes."""

    def is_complete(self) -> bool:
        """Return whether the file is known to have the object's content already."""
        if not os.path.isfile(self._path) or self._path.is_symlink():
            return False
        if self._sha256:
            return self._path.stat().st_size == self._entry.size and sha256(self._path) == self._sha256
        return bool(has_content(self._path, self._entry))

    def run(self) -> None:
        try:
            with local_errors(self._path):
                self._retries.call(self._try, lambda: self._counted)
        except (StorageError, TransferCanceled) as error:
            # Without a tag, the rest of the object may belong to other content.
            if isinstance(error.__cause__, OSError) or not self._entry.tag:
                self.discard()
            raise

    def discard(self) -> None:
        """Remove the incomplete file."""
        self._part.unlink(missing_ok=True)

    def _try(self) -> None:
        # Without a tag, the rest of the object may not belong to this incomplete file.
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | (0 if self._entry.tag else os.O_TRUNC)
        with os.fdopen(os.open(self._part, flags, 0o666), "r+b") as part:
            at = part.seek(0, os.SEEK_END)
            if at > self._entry.size:
                at = part.truncate(0)
            part.seek(at)
            self._count(at)

            def keep(piece: bytes) -> None:
                self._retries.check()
                part.write(piece)
                self._count(self._counted + len(piece))

            if at < self._entry.size:
                self._store.read(self._entry, at, keep)
        self._verify()
        if self._entry.modified is not None:
            os.utime(self._part, (file_time(self._entry.modified),) * 2)
        os.replace(self._part, self._path)

    def _count(self, size: int) -> None:
        self._counter.add(size - self._counted)
        self._counted = size

    def _verify(self) -> None:
        size = self._part.stat().st_size
        if size != self._entry.size:
            self._raise_retryable(f"received {size:,} of {self._entry.size:,} bytes", keep=size < self._entry.size)
        if not has_content(self._part, self._entry):
            # The checksum of the listing may be missing or outdated, so request the checksum of this object.
            now = self._store.stat(self._entry.key)
            if now.tag != self._entry.tag or now.size != self._entry.size:
                self._raise_retryable("it was changed during the download", keep=False)
            if has_content(self._part, now) is False:
                self._raise_retryable("the downloaded content does not have the checksum of the store", keep=False)
        if self._sha256 and sha256(self._part) != self._sha256:
            self.discard()
            raise StorageError(
                f"{self._shown} has changed since it was uploaded: its SHA-256 is different",
                hint="upload the files as a new version of the dataset",
            )

    def _raise_retryable(self, why: str, *, keep: bool) -> NoReturn:
        if not keep:
            self._part.unlink(missing_ok=True)
        raise StorageUnreachable(f"{self._shown}: {why}")


# -- uploads ----------------------------------------------------------------------------------------------------------


def upload(
    store: DataStore,
    url: StorageUrl,
    files: Sequence[UploadSource],
    *,
    at_once: int = 8,
    retries: Retries | None = None,
    on_progress: Progress = ignore_progress,
) -> TransferResult:
    """Write files below a URL, and verify each written file in the store. Raises ``StorageError`` and ``TransferCanceled``.

    A file is skipped if the store's checksum shows that the destination already has its content.
    """
    retries = retries or Retries()
    counter = _ByteCounter(sum(one.size for one in files), on_progress)
    existing = {entry.key: entry for entry in retries.call(lambda: store.find(url.key))} if files else {}

    def send(one: UploadSource) -> bool:
        destination = url.below(one.name)
        if destination.key in existing and has_content(one.path, existing[destination.key]):
            counter.add(one.size)
            return True
        retries.call(lambda: _write(store, destination, one, retries, counter))
        return False

    return _result([one.size for one in files], _for_all(files, send, at_once, retries))


def _write(store: DataStore, destination: StorageUrl, one: UploadSource, retries: Retries, counter: _ByteCounter) -> None:
    sent = 0

    def on_bytes(count: int) -> None:
        nonlocal sent
        retries.check()
        sent += count
        counter.add(count)

    try:
        with local_errors(one.path):
            before = one.path.lstat()
        if not stat.S_ISREG(before.st_mode):
            raise StorageError(f"{one.path} is no longer a regular file", hint=_CHANGED_HINT)
        store.write(destination.key, one.path, on_bytes)
        found = store.stat(destination.key)
        with local_errors(one.path):
            after = one.path.lstat()
        if (before.st_ino, before.st_size, before.st_mtime_ns) != (after.st_ino, after.st_size, after.st_mtime_ns):
            raise StorageError(f"{one.path} was changed during its upload to {destination}", hint=_CHANGED_HINT)
        if found.size != before.st_size or has_content(one.path, found) is False:
            raise StorageUnreachable(f"{destination}: the stored object differs from the uploaded file")
    except BaseException:
        counter.add(-sent)
        raise
    counter.add(one.size - sent)


# -- several objects at once ------------------------------------------------------------------------------------------


class _ByteCounter:
    """Counts the transferred bytes of several threads, and reports them."""

    def __init__(self, total: int, on_progress: Progress) -> None:
        self.total = total
        self.done = 0
        self._on_progress = on_progress
        self._lock = threading.Lock()
        on_progress(0, total)

    def add(self, count: int) -> None:
        """Count more bytes; a negative number when bytes must be sent again."""
        with self._lock:
            self.done += count
            self._on_progress(min(self.done, self.total), self.total)


def _for_all(items: Sequence[_T], act: Callable[[_T], _R], at_once: int, retries: Retries) -> list[_R]:
    """Call ``act`` for all items, ``at_once`` at a time. The first failure cancels the other calls, and is then raised."""
    with ThreadPoolExecutor(max_workers=max(1, min(at_once, len(items) or 1)), thread_name_prefix="data") as workers:
        futures = [workers.submit(act, item) for item in items]
        try:
            wait(futures, return_when=FIRST_EXCEPTION)
            failure = next((one.exception() for one in futures if one.done() and one.exception()), None)
        except BaseException:
            retries.canceled.set()
            raise
        if failure is not None:
            retries.canceled.set()
            for one in futures:
                one.cancel()
            raise failure
    return [one.result() for one in futures]
