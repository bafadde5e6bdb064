"""Open the store of a URL, and check the permissions of its credentials."""

from __future__ import annotations

import importlib
from enum import Enum

from distflow.documents.urls import READ_ONLY, StorageUrl
from distflow.storage.base import DataStore
from distflow.storage.credentials import CredentialsFor, ambient_credentials
from distflow.storage.failures import Retries, driver_errors, no_credentials
from distflow.storage.files import FolderStore
from distflow.storage.objects import open_objects
from distflow.storage.sftp import SftpStore
from distflow.storage.web import WebStore

__all__ = ["Access", "check_access", "check_credentials", "open_store"]


class Access(str, Enum):
    """A kind of access to data at a URL."""

    READ = "READ"
    WRITE = "WRITE"
    DELETE = "DELETE"


def open_store(url: StorageUrl, credentials_for: CredentialsFor = ambient_credentials) -> DataStore:
    """Return the store of a URL, without sending it any request.

    Raises ``InputError`` when the driver of the store is not installed, or when a web or SFTP URL is not valid, and
    ``StorageError`` when the driver fails, such as for lack of credentials.
    """
    if url.scheme == "file":
        return FolderStore()
    if url.scheme in READ_ONLY:
        return WebStore(url)
    if url.scheme == "sftp":
        # The sftp driver of fsspec accepts any host key.
        return SftpStore(url)
    return open_objects(url, credentials_for(url.profile))


def check_credentials(url: StorageUrl, credentials_for: CredentialsFor = ambient_credentials) -> None:
    """Raise ``StorageRefused`` when no credentials exist for a URL of S3.

    This checks distflow's credentials and the environment, files and roles that the driver reads; it sends no request to
    the store. The other drivers cannot check their credentials without a request.
    """
    if url.scheme != "s3" or credentials_for(url.profile) is not None:
        return
    with driver_errors(str(url)):
        found = importlib.import_module("botocore.session").Session().get_credentials()
    if found is None:
        reason = "distflow has no credential for it, and no AWS variables, files or roles were found"
        raise no_credentials(str(url), reason)


def check_access(store: DataStore, url: StorageUrl, access: Access, *, retries: Retries | None = None) -> None:
    """Try the access, and raise ``StorageError`` if the store does not allow it (``InputError`` if the store is read-only).

    For WRITE and DELETE, an empty object is written below the URL and removed. Stores of files use the nearest existing
    directory.
    """
    retries = retries or Retries()
    if access is Access.READ:
        retries.call(lambda: store.check_readable(url.key))
    else:
        retries.call(lambda: store.check_writable(url.key))
