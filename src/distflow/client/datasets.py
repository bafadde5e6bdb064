"""Create, list, download and delete datasets: named collections of files, in versions that never change."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from distflow.client.client import Client
from distflow.client.data import OnBytes, TransferResult
from distflow.documents.urls import parse_dataset
from distflow.errors import InputError, NotFound
from distflow.storage.datasets import Datasets, Manifest

__all__ = ["Manifest", "create_version", "delete_versions", "download_dataset", "list_datasets", "read_versions"]


def list_datasets(client: Client) -> list[tuple[Manifest, list[int]]]:
    """Return the latest version of each dataset, with the numbers of all its versions.

    Raises:
        StorageError: if the storage of datasets cannot be read.

    """
    with _open_datasets(client) as datasets:
        numbers: dict[str, list[int]] = {}
        for one in datasets.versions():
            numbers.setdefault(one.name, []).append(one.number)
        return [(datasets.manifest(name, max(some)), some) for name, some in numbers.items()]


def read_versions(client: Client, name: str) -> list[Manifest]:
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
        every: list[int | None] = [] if ":" in name else [one.number for one in datasets.versions(plain_name)]
        return [datasets.manifest(plain_name, one) for one in every or [number]]


def create_version(
    client: Client,
    name: str,
    paths: Sequence[Path],
    *,
    regex: str = "",
    is_update: bool = False,
    on_progress: OnBytes = lambda *_: None,
) -> Manifest:
    """Create a new version of a dataset from files of this machine.

    The version becomes visible only after all its files are uploaded.

    Args:
        client: The client whose configuration names the storage of datasets.
        name: The name of the dataset. With ``is_update``, also ``name:version`` to choose the base version.
        paths: Files and directories. The name of a directory is part of the paths in the dataset.
        regex: A regular expression. Only files whose path matches are uploaded.
        is_update: Whether to add the files to the files of the latest (or the named) version, replacing equal paths.
        on_progress: Called with the progress in bytes. See ``OnBytes``.

    Returns:
        The manifest of the new version.

    Raises:
        InputError: if the name is not valid.
        NotFound: if there are no files to upload, or if the version to update does not exist.
        StorageError: if the storage of datasets is unreachable or refuses the access.

    """
    from distflow.storage.files import find_sources

    if not is_update and ":" in name:
        raise InputError(
            f"`{name}` names a version: a new one gets the next number", hint="leave the colon and what follows out"
        )
    parse_dataset(name)
    files = find_sources(paths, regex)
    if not files:
        raise NotFound("there is no file to upload" + (f" that `{regex}` matches" if regex else ""))
    with _open_datasets(client) as datasets:
        write = datasets.update if is_update else datasets.add
        at = time.time()  # noqa: TID251  the moment of creation
        return write(name, files, upload_id=secrets.token_hex(8), at=at, on_progress=on_progress)


def download_dataset(
    client: Client, name: str, directory: Path, *, regex: str = "", resume: bool = False, on_progress: OnBytes = lambda *_: None
) -> tuple[Manifest, TransferResult]:
    """Download a version of a dataset into ``directory/<name of the dataset>``.

    Args:
        client: The client whose configuration names the storage of datasets.
        name: The name of the dataset, for its latest version, or ``name:version``.
        directory: An existing directory.
        regex: A regular expression. Only files whose path matches are downloaded.
        resume: Whether to skip files that exist with the right content.
        on_progress: Called with the progress in bytes. See ``OnBytes``.

    Returns:
        The manifest of the version and the result of the transfer.

    Raises:
        InputError: if ``directory`` does not exist or the name is not valid.
        NotFound: if the dataset or version does not exist, or if no file matches.
        StorageError: if the storage of datasets is unreachable or refuses the access.

    """
    plain_name, number = parse_dataset(name)
    if not directory.is_dir():
        raise InputError(f"{directory} is no directory", hint=f"mkdir -p {directory}")
    with _open_datasets(client) as datasets:
        manifest = datasets.manifest(plain_name, number)
        moved = datasets.fetch(manifest, directory / plain_name, regex=regex, resume=resume, on_progress=on_progress)
    if not moved.files and regex:
        raise NotFound(f"nothing of {plain_name}:{manifest.number} is matched by `{regex}`")
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
        there = [one.number for one in datasets.versions(plain_name)]
        gone = there if all_versions and there else [datasets.manifest(plain_name, number).number]
        for one in gone:
            datasets.remove(plain_name, one)
    return gone


@contextmanager
def _open_datasets(client: Client) -> Iterator[Datasets]:
    from distflow.documents.urls import parse_url
    from distflow.storage.stores import open_store

    base = parse_url(client.datasets_url(client.configuration()), writes=True)
    store = open_store(base, client.credentials_for())
    try:
        yield Datasets(store, base)
    finally:
        store.close()
