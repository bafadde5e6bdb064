"""Inputs and outputs of tasks at URLs and in datasets, and archives for relaying them through this machine.

An archive depends only on names, contents and times. Its name is its SHA-256, as for the outputs that nodes pack.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tarfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace  # noqa: TID251  nodes have no msgspec
from pathlib import Path
from typing import BinaryIO

from distflow.documents.urls import parse_dataset, parse_url
from distflow.errors import StorageError
from distflow.runtime.files.safe_files import publish
from distflow.runtime.files.unpacking import unpack
from distflow.runtime.wire import OpError
from distflow.storage.base import DataStore, Progress, ignore_progress
from distflow.storage.datasets import Datasets
from distflow.storage.failures import Retries, local_errors
from distflow.storage.files import find_sources
from distflow.storage.transfers import TransferResult, download, find, upload

__all__ = [
    "Archive", "Delivered", "Delivery", "InputRequest", "RelayRequired", "deliver", "fetch_input", "inspect_input",
    "make_archive", "pin_version", "unpacked",
]  # fmt: skip


# -- inputs -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class InputRequest:
    """An input of a task."""

    url: str
    """``{{workflow_id}}`` in it is already replaced."""
    regex: str = ""
    """Matched from the start of the relative path."""
    dataset: str = ""
    """A dataset below the URL, with or without a version; empty: the data at the URL itself."""

    @property
    def label(self) -> str:
        """The input in a printable form."""
        return f"dataset {self.dataset}" if self.dataset else str(parse_url(self.url))


def pin_version(store: DataStore, request: InputRequest, retries: Retries | None = None) -> InputRequest:
    """Return the request with the latest version of its dataset, so that several nodes fetch the same version.

    A request without a dataset or with a fixed version is returned unchanged. Raises ``StorageError``, and ``NotFound``
    when the dataset has no version.
    """
    name, number = parse_dataset(request.dataset) if request.dataset else ("", 0)
    if number is not None:
        return request
    number = Datasets(store, parse_url(request.url), retries).manifest(name).number
    return replace(request, dataset=f"{name}:{number}")


def inspect_input(store: DataStore, request: InputRequest, retries: Retries | None = None) -> TransferResult:
    """Return the number of files and bytes of an input without fetching it. Raises ``StorageError`` and ``NotFound``."""
    url = parse_url(request.url)
    if request.dataset:
        name, number = parse_dataset(request.dataset)
        sizes = [one.size for one in Datasets(store, url, retries).manifest(name, number).matching(request.regex)]
    else:
        sizes = [one.entry.size for one in find(store, url, request.regex, may_be_empty=True, retries=retries)]
    return TransferResult(files=len(sizes), size=sum(sizes))


def fetch_input(
    store: DataStore,
    request: InputRequest,
    files: Path,
    *,
    retries: Retries | None = None,
    on_progress: Progress = ignore_progress,
) -> TransferResult:
    """Fetch an input to the directory ``files``, which then contains no other files.

    Files of an earlier call are kept if their checksum is right, and continued if they are incomplete. If the directory also
    contains other files, everything is fetched again. The files of a dataset are in a directory with its name. If the URL has
    no matching objects, the directory stays empty. Raises ``StorageError``, ``TransferCanceled`` and ``NotFound``.
    """
    with local_errors(files):
        files.mkdir(parents=True, exist_ok=True)
    result = _fetch(store, request, files, True, retries, on_progress)
    if len(find_sources([files], contents=True)) > result.files:
        # An earlier attempt left files that are not, or no longer, a part of the input.
        with local_errors(files):
            shutil.rmtree(files)
            files.mkdir()
        result = _fetch(store, request, files, False, retries, on_progress)
    return result


def _fetch(
    store: DataStore, request: InputRequest, files: Path, resume: bool, retries: Retries | None, on_progress: Progress
) -> TransferResult:
    url = parse_url(request.url)
    if not request.dataset:
        return download(
            store, url, files, regex=request.regex, may_be_empty=True, resume=resume, retries=retries, on_progress=on_progress
        )  # fmt: skip
    name, number = parse_dataset(request.dataset)
    datasets = Datasets(store, url, retries)
    manifest = datasets.manifest(name, number)
    return datasets.fetch(manifest, files / name, regex=request.regex, resume=resume, on_progress=on_progress)


# -- outputs ----------------------------------------------------------------------------------------------------------


class RelayRequired(Exception):
    """A node cannot transfer an output or input itself, so the supervisor must relay it. The text is the reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivery:
    """An output of a task, and its destination."""

    url: str
    """``{{workflow_id}}`` in it is already replaced."""
    regex: str = ""
    """Matched from the start of the relative path."""
    dataset: str = ""
    """A dataset below the URL; empty: the URL itself is the destination."""
    paths: Sequence[str] = ()
    """For a dataset: the parts of the output to upload; empty: all of it."""
    is_update: bool = False
    """For a dataset: whether the new version keeps the files of the named version (default: the latest one)."""
    upload_id: str = ""
    """For a dataset: the id of this upload. A retry has the same id, and continues the upload."""
    at: float = 0.0
    """For a dataset: the creation time of its version."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivered:
    """The result of a delivery."""

    label: str
    """The destination in a printable form; a dataset with its version."""
    files: int
    size: int
    """Bytes of the files; for a dataset, of all files of its version."""


def deliver(
    store: DataStore,
    delivery: Delivery,
    top: Path,
    *,
    retries: Retries | None = None,
    on_progress: Progress = ignore_progress,
) -> Delivered:
    """Upload the files of a directory. A file is not sent if the store's checksum shows that the store has its content.

    For a dataset, a new version is made, unless there is no file to upload. Raises ``StorageError`` and ``TransferCanceled``,
    and ``NotFound`` when the version to update does not exist.
    """
    url = parse_url(delivery.url, writes=True)
    if not delivery.dataset:
        files = find_sources([top], delivery.regex, contents=True, only_files=True)
        result = upload(store, url, files, retries=retries, on_progress=on_progress)
        return Delivered(label=str(url), files=result.files, size=result.size)
    for path in delivery.paths:
        if not (top / path).exists():
            message = (
                f"dataset {delivery.dataset}: the output has no `{path}`: write it to `{{{{output}}}}`, or correct `outputs`"
            )
            raise StorageError(message)
    # Users do not know the name of the output directory, so `.` means its contents.
    is_whole = not delivery.paths or any(top / path == top for path in delivery.paths)
    tops = [top] if is_whole else [top / path for path in delivery.paths]
    files = find_sources(tops, delivery.regex, contents=is_whole, only_files=True)
    if not files:
        return Delivered(label=f"dataset {delivery.dataset}", files=0, size=0)
    name, _ = parse_dataset(delivery.dataset)
    datasets = Datasets(store, url, retries)
    if delivery.is_update:
        made = datasets.update(
            delivery.dataset, files, upload_id=delivery.upload_id, at=delivery.at, on_progress=on_progress
        )  # fmt: skip
    else:
        made = datasets.add(name, files, upload_id=delivery.upload_id, at=delivery.at, on_progress=on_progress)
    return Delivered(label=f"dataset {name}:{made.number}", files=len(made.files), size=made.size)


# -- archives ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Archive:
    """A tar file in a directory of blobs."""

    digest: str
    """Its SHA-256, which is also its name."""
    size: int
    """Bytes of the tar file."""
    content: TransferResult
    """The number and the size of the files in it."""


def make_archive(fetch: Callable[[Path], TransferResult], blobs: Path, scratch: Path, retries: Retries) -> Archive:
    """Pack the files that ``fetch`` writes to a directory, and store the archive as a blob.

    No other transfer may use ``scratch``. Files of an earlier attempt in it are reused, and it is removed on success. Raises
    ``StorageError`` and ``TransferCanceled``.
    """
    files, part = scratch / "files", scratch / "archive"
    content = fetch(files)
    with local_errors(part):
        try:
            digest, size = _pack(files, part, retries)
            with part.open("rb") as packed:
                publish(packed, str(blobs / digest))
        finally:
            part.unlink(missing_ok=True)
        shutil.rmtree(scratch)
    return Archive(digest=digest, size=size, content=content)


@contextmanager
def unpacked(archive: Path, scratch: Path) -> Iterator[Path]:
    """Unpack an archive into ``scratch`` for the block, and remove ``scratch`` afterwards. Raises ``StorageError``."""
    shutil.rmtree(scratch, ignore_errors=True)
    try:
        try:
            with local_errors(scratch):
                scratch.mkdir(parents=True)
                with archive.open("rb") as source:
                    unpack(source, os.fspath(scratch), compressed=False)
        except OpError as error:
            raise StorageError(f"cannot unpack the archive {archive} of an output: {error}") from error
        yield scratch
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


class _HashingFile:
    """A file that computes the SHA-256 of its content while it is written."""

    def __init__(self, file: BinaryIO, retries: Retries) -> None:
        self._file = file
        self._retries = retries
        self.digest = hashlib.sha256()
        self.size = 0

    def write(self, data: bytes) -> int:
        self._retries.check()
        self.digest.update(data)
        self.size += len(data)
        return self._file.write(data)


def _pack(top: Path, path: Path, retries: Retries) -> tuple[str, int]:
    with path.open("wb") as file:
        sink = _HashingFile(file, retries)
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
