"""Data at URLs and datasets, without a workflow: upload, download, list and delete.

A dataset is a named collection of files, in versions that never change. Functions that take a ``Client`` raise ``InputError``
also if the package for the storage is not installed.
"""

from __future__ import annotations

import os
import secrets
import shlex
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from distflow.client.client import Client
from distflow.documents.urls import StorageUrl, parse_dataset, parse_url
from distflow.errors import InputError, NotFound
from distflow.storage.base import DataStore, SelectedObject
from distflow.storage.datasets import DatasetManifest, Datasets
from distflow.storage.files import UploadSource, find_sources
from distflow.storage.transfers import TransferResult

__all__ = [
    "DatasetManifest",
    "OnBytes",
    "SelectedObject",
    "TransferResult",
    "check_data_access",
    "create_version",
    "delete_data",
    "delete_versions",
    "download_data",
    "download_dataset",
    "list_data",
    "list_datasets",
    "parse_data_url",
    "read_versions",
    "upload_data",
]


OnBytes = Callable[[int, int], None]
"""A progress callback. It gets the number of bytes transferred and the total number of bytes. Several threads call it."""


def parse_data_url(text: str, *, writes: bool = False) -> StorageUrl:
    """Parse a URL of data. Raises ``InputError`` if it is not valid or, with ``writes``, if its scheme is read-only."""
    return parse_url(text, writes=writes)


def upload_data(
    client: Client,
    url: str,
    paths: Sequence[Path],
    *,
    regex: str = "",
    threads: int = 8,
    on_progress: OnBytes = lambda *_: None,
) -> TransferResult:
    """Upload files below a URL. A file is skipped if its checksum in the storage shows that it was uploaded before.

    Args:
        client: The client whose credentials are used.
        url: The URL below which the files are written.
        paths: Files and directories of this machine. The name of a directory is part of the URLs of its files.
        regex: A regular expression. Only files whose relative path matches from its start are uploaded.
        threads: The number of files that are uploaded in parallel.
        on_progress: Called with the progress in bytes. See ``OnBytes``.

    Returns:
        The counts of the transfer.

    Raises:
        InputError: if the URL or the regular expression is not valid, or if the URL cannot be written.
        NotFound: if there are no files to upload.
        StorageError: if a local file cannot be read, if two files have the same name, or if the storage is unreachable or
            refuses the access.

    """
    from distflow.storage.transfers import upload

    goal = parse_url(url, writes=True)
    files = _files_to_upload(paths, regex)
    with _open_store(client, goal) as store:
        return upload(store, goal, files, at_once=threads, on_progress=on_progress)


def download_data(
    client: Client,
    url: str,
    directory: Path,
    *,
    regex: str = "",
    resume: bool = False,
    threads: int = 8,
    on_progress: OnBytes = lambda *_: None,
) -> TransferResult:
    """Download the data at a URL into a directory.

    Args:
        client: The client whose credentials are used.
        url: The URL of one object or of a folder.
        directory: An existing directory.
        regex: A regular expression. Only files whose relative path matches from its start are downloaded.
        resume: Whether to skip files that exist with the right content.
        threads: The number of files that are downloaded in parallel.
        on_progress: Called with the progress in bytes. See ``OnBytes``.

    Returns:
        The counts of the transfer.

    Raises:
        InputError: if the URL or the regular expression is not valid, or if ``directory`` is not an existing directory.
        NotFound: if there are objects at the URL, but none matches.
        StorageError: if there is no object at the URL, or if the storage is unreachable or refuses the access.

    """
    from distflow.storage.transfers import download

    source = parse_url(url)
    _check_directory(directory)
    with _open_store(client, source) as store:
        moved = download(store, source, directory, regex=regex, resume=resume, at_once=threads, on_progress=on_progress)
    if not moved.files:
        raise NotFound(f"no object at {source} matches `{regex}`", hint="`distflow data list` shows the objects")
    return moved


def list_data(client: Client, url: str, *, regex: str = "", prefix: str = "") -> list[SelectedObject]:
    """Return the objects at a URL, or an empty list if there are none.

    Args:
        client: The client whose credentials are used.
        url: The URL of one object or of a folder.
        regex: A regular expression. Only objects whose relative path matches from its start are returned.
        prefix: Only objects whose relative path begins with this text are returned.

    Raises:
        InputError: if the URL or the regular expression is not valid.
        StorageError: if there is nothing at a web URL, if a bucket does not exist, or if the storage is unreachable or refuses
            the access.

    """
    from distflow.storage.base import compile_regex, select
    from distflow.storage.failures import Retries

    source = parse_url(url)
    compile_regex(regex)
    with _open_store(client, source) as store:
        entries = Retries().call(lambda: store.find(source.key))
    return [one for one in select(source, entries, regex) if one.name.startswith(prefix)]


def delete_data(client: Client, url: str, *, regex: str = "") -> int:
    """Delete the objects at a URL.

    Args:
        client: The client whose credentials are used.
        url: The URL of one object or of a folder.
        regex: A regular expression. Only objects whose relative path matches from its start are deleted.

    Returns:
        The number of deleted objects.

    Raises:
        InputError: if the URL or the regular expression is not valid, or the URL cannot be written or names a root directory.
        NotFound: if there are objects at the URL, but none matches.
        StorageError: if there is no object at the URL, or if the storage is unreachable or refuses the access.

    """
    from distflow.storage.transfers import delete, find_removable

    goal = parse_url(url, writes=True)
    if goal.scheme in ("file", "sftp") and not goal.key:
        machine = "this machine" if goal.scheme == "file" else goal.container
        raise InputError(
            f"cannot delete `{goal}`: it is the root directory of {machine}", hint="use the URL of a directory below it"
        )
    with _open_store(client, goal) as store:
        wanted = find_removable(store, goal, regex)
        if not wanted:
            raise NotFound(f"no object at {goal} matches `{regex}`", hint="`distflow data list` shows the objects")
        return delete(store, goal, wanted)


def check_data_access(client: Client, url: str, access: str) -> None:
    """Check that this user may access a URL, by trying it. ``WRITE`` and ``DELETE`` write and remove an empty object below it.

    Args:
        client: The client whose credentials are used.
        url: The URL to check.
        access: ``READ``, ``WRITE`` or ``DELETE``.

    Raises:
        InputError: if the URL is not valid or cannot be written.
        StorageError: if the storage is unreachable or refuses the access.

    """
    from distflow.storage.stores import Access, check_access

    goal = parse_url(url, writes=access != "READ")
    with _open_store(client, goal) as store:
        check_access(store, goal, Access(access))


def _check_directory(path: Path) -> None:
    """Raise ``InputError`` if a path is not a directory."""
    if os.path.isdir(path):  # ``Path.is_dir`` raises an error for a path that cannot be inspected
        return
    if os.path.exists(path):
        raise InputError(f"{path} is not a directory", hint="choose another path")
    raise InputError(f"the directory {path} does not exist", hint=f"create it: mkdir -p {shlex.quote(str(path))}")


def _files_to_upload(paths: Sequence[Path], regex: str) -> tuple[UploadSource, ...]:
    if files := find_sources(paths, regex):
        return files
    if not regex:
        raise NotFound("there are no files to upload", hint="the paths are empty directories: give paths with files")
    hint = "the pattern must match names from their start, and names begin with their directory, as in `results/a.json`"
    raise NotFound(f"there are no files to upload that match `{regex}`", hint=hint)


@contextmanager
def _open_store(client: Client, url: StorageUrl) -> Iterator[DataStore]:
    from distflow.storage.stores import open_store

    store = open_store(url, client.credentials_for())
    try:
        yield store
    finally:
        store.close()


def list_datasets(client: Client) -> list[tuple[DatasetManifest, list[int]]]:
    """Return the latest version of each dataset, with the numbers of all its versions.

    Raises:
        StorageError: if the storage of datasets cannot be read.

    """
    with _open_datasets(client) as datasets:
        numbers: dict[str, list[int]] = {}
        for one in datasets.versions():
            numbers.setdefault(one.name, []).append(one.number)
        return [(datasets.manifest(name, max(versions)), versions) for name, versions in numbers.items()]


def read_versions(client: Client, name: str) -> list[DatasetManifest]:
    """Return versions of a dataset.

    Args:
        client: The client whose configuration names the storage of datasets.
        name: The name of the dataset, for all its versions, or ``name:version``, for one version.

    Raises:
        InputError: if the name is not valid.
        NotFound: if the dataset or the version does not exist.
        StorageError: if the storage of datasets cannot be read.

    """
    plain_name, number = parse_dataset(name)
    with _open_datasets(client) as datasets:
        numbers: list[int | None] = [] if ":" in name else [one.number for one in datasets.versions(plain_name)]
        return [datasets.manifest(plain_name, one) for one in numbers or [number]]


def create_version(
    client: Client,
    name: str,
    paths: Sequence[Path],
    *,
    regex: str = "",
    is_update: bool = False,
    on_progress: OnBytes = lambda *_: None,
) -> DatasetManifest:
    """Create a new version of a dataset from files of this machine.

    The version becomes visible only after all its files are uploaded.

    Args:
        client: The client whose configuration names the storage of datasets.
        name: The name of the dataset. With ``is_update``, also ``name:version`` to choose the base version.
        paths: Files and directories. The name of a directory is part of the paths in the dataset.
        regex: A regular expression. Only files whose path matches from its start are uploaded.
        is_update: Whether to add the files to those of the latest (or the named) version. Files of the same path are replaced.
        on_progress: Called with the progress in bytes. See ``OnBytes``.

    Returns:
        The manifest of the new version.

    Raises:
        InputError: if the name or the regular expression is not valid, or if the name has a version and ``is_update`` is false.
        NotFound: if there are no files to upload, or if the version to update does not exist.
        StorageError: if a local file cannot be read, if two files have the same name, or if the storage of datasets is
            unreachable or refuses the access.

    """
    if not is_update and ":" in name:
        raise InputError(
            f"`{name}` names a version, but a new version gets the next number", hint="remove the colon and the version"
        )
    parse_dataset(name)
    files = _files_to_upload(paths, regex)
    with _open_datasets(client) as datasets:
        write = datasets.update if is_update else datasets.add
        at = time.time()  # noqa: TID251  the moment of creation
        return write(name, files, upload_id=secrets.token_hex(8), at=at, on_progress=on_progress)


def download_dataset(
    client: Client, name: str, directory: Path, *, regex: str = "", resume: bool = False, on_progress: OnBytes = lambda *_: None
) -> tuple[DatasetManifest, TransferResult]:
    """Download a version of a dataset into ``directory/<name of the dataset>``.

    Args:
        client: The client whose configuration names the storage of datasets.
        name: The name of the dataset, for its latest version, or ``name:version``.
        directory: An existing directory.
        regex: A regular expression. Only files whose path matches from its start are downloaded.
        resume: Whether to skip files that exist with the right content.
        on_progress: Called with the progress in bytes. See ``OnBytes``.

    Returns:
        The manifest of the version and the result of the transfer.

    Raises:
        InputError: if ``directory`` is not an existing directory, or if the name or the regular expression is not valid.
        NotFound: if the dataset or version does not exist, or if no file matches.
        StorageError: if the storage of datasets is unreachable or refuses the access.

    """
    plain_name, number = parse_dataset(name)
    _check_directory(directory)
    with _open_datasets(client) as datasets:
        manifest = datasets.manifest(plain_name, number)
        moved = datasets.fetch(manifest, directory / plain_name, regex=regex, resume=resume, on_progress=on_progress)
    if not moved.files and regex:
        version = f"{plain_name}:{manifest.number}"
        raise NotFound(f"no file of {version} matches `{regex}`", hint=f"list its files: distflow dataset info {version}")
    return manifest, moved


def delete_versions(client: Client, name: str, *, all_versions: bool = False) -> list[int]:
    """Delete a version of a dataset, or all versions.

    Args:
        client: The client whose configuration names the storage of datasets.
        name: The name of the dataset, for its latest version, or ``name:version``.
        all_versions: Whether to delete all versions of the dataset.

    Returns:
        The numbers of the deleted versions.

    Raises:
        InputError: if the name is not valid.
        NotFound: if the dataset or the version does not exist.
        StorageError: if the storage of datasets is unreachable or refuses the access.

    """
    plain_name, number = parse_dataset(name)
    with _open_datasets(client) as datasets:
        existing = [one.number for one in datasets.versions(plain_name)]
        deleted = existing if all_versions and existing else [datasets.manifest(plain_name, number).number]
        for one in deleted:
            datasets.remove(plain_name, one)
    return deleted


@contextmanager
def _open_datasets(client: Client) -> Iterator[Datasets]:
    base = parse_url(client.datasets_url(client.configuration()), writes=True)
    with _open_store(client, base) as store:
        yield Datasets(store, base)
