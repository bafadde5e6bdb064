"""Data at URLs, moved to and from this machine without any workflow."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from distflow.client.client import Client
from distflow.documents.urls import StorageUrl, parse_url
from distflow.errors import InputError, NotFound
from distflow.storage.base import SelectedObject, Store
from distflow.storage.transfers import TransferResult

__all__ = [
    "OnBytes",
    "SelectedObject",
    "TransferResult",
    "check_data_access",
    "delete_data",
    "download_data",
    "list_data",
    "parse_data_url",
    "upload_data",
]

OnBytes = Callable[[int, int], None]
"""Called with the bytes that are done and the bytes in all, from several threads."""


def parse_data_url(text: str, *, writes: bool = False) -> StorageUrl:
    """Return a URL of data; with ``writes`` one that can be written. Raises ``InputError``."""
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
    """Write files below a URL; a directory keeps its name. What is there already with the same content is not sent again.

    Args:
        client: Whose credentials.
        url: Where to.
        paths: Files and directories of this machine.
        regex: Only files whose relative path it matches.
        threads: Files that are moved at the same time.
        on_progress: Called with the progress.

    Raises:
        InputError: for a URL that cannot be written.
        NotFound: when there is no file to upload.
        StorageError: when the store cannot be reached or refuses.

    """
    from distflow.storage.files import find_sources
    from distflow.storage.transfers import upload

    goal = parse_url(url, writes=True)
    files = find_sources(paths, regex)
    if not files:
        raise NotFound("there is no file to upload" + (f" that `{regex}` matches" if regex else ""))
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
    """Fetch what a URL names into a directory; the arguments are those of ``upload_data``.

    ``resume`` leaves files alone that are there with the right content. Raises ``InputError`` without such a directory,
    ``NotFound`` when nothing matches, and ``StorageError``.
    """
    from distflow.storage.transfers import download

    source = parse_url(url)
    if not directory.is_dir():
        raise InputError(f"{directory} is no directory", hint=f"mkdir -p {directory}")
    with _open_store(client, source) as store:
        moved = download(store, source, directory, regex=regex, resume=resume, at_once=threads, on_progress=on_progress)
    if not moved.files:
        raise NotFound(f"nothing at {source} is matched by `{regex}`", hint="`distflow data list -r` shows the paths")
    return moved


def list_data(client: Client, url: str, *, regex: str = "", prefix: str = "") -> list[SelectedObject]:
    """Return the objects at a URL whose relative path a regex matches and begins with ``prefix``. Raises ``StorageError``."""
    from distflow.storage.base import compile_regex, select
    from distflow.storage.failures import Retries

    source = parse_url(url)
    compile_regex(regex)
    with _open_store(client, source) as store:
        entries = Retries().call(lambda: store.find(source.key))
    return [one for one in select(source, entries, regex) if one.name.startswith(prefix)]


def delete_data(client: Client, url: str, *, regex: str = "") -> int:
    """Remove the objects at a URL and return how many there were.

    Raises ``InputError`` for a URL that is a whole machine, ``NotFound`` when nothing matches, and ``StorageError``.
    """
    from distflow.storage.transfers import delete, find_removable

    goal = parse_url(url, writes=True)
    if goal.scheme in ("file", "sftp") and not goal.key:
        raise InputError(f"{goal} is a whole machine", hint="name a directory")
    with _open_store(client, goal) as store:
        wanted = find_removable(store, goal, regex)
        if not wanted:
            raise NotFound(f"nothing at {goal} is matched by `{regex}`", hint="`distflow data list -r` shows the paths")
        return delete(store, goal, wanted)


def check_data_access(client: Client, url: str, access: str) -> None:
    """Check that a URL allows ``READ``, ``WRITE`` or ``DELETE``, by doing so. Raises ``StorageError`` when it does not."""
    from distflow.storage.stores import Access, check_access

    goal = parse_url(url, writes=access != "READ")
    with _open_store(client, goal) as store:
        check_access(store, goal, Access(access))


@contextmanager
def _open_store(client: Client, url: StorageUrl) -> Iterator[Store]:
    from distflow.storage.stores import open_store

    store = open_store(url, client.credentials_for())
    try:
        yield store
    finally:
        store.close()
