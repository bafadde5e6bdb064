"""From a URL to the store that holds it."""

from __future__ import annotations

from distflow.documents.urls import READ_ONLY, StorageUrl
from distflow.storage.base import Store
from distflow.storage.credentials import CredentialsFor, ambient
from distflow.storage.folder import FolderStore
from distflow.storage.objects import open_objects
from distflow.storage.sftp import SftpStore
from distflow.storage.web import WebStore

__all__ = ["open_store"]


def open_store(url: StorageUrl, credentials_for: CredentialsFor = ambient) -> Store:
    """Open the container of a URL; nothing is asked of it yet.

    Raises ``InputError`` when its driver is not installed here.
    """
    if url.scheme == "file":
        return FolderStore()
    if url.scheme in READ_ONLY:
        return WebStore(url)
    if url.scheme == "sftp":
        # fsspec's own driver takes any host key, which is never done here.
        return SftpStore(url)
    return open_objects(url, credentials_for(url.profile))
