"""From a URL to the store that holds it."""

from __future__ import annotations

import importlib

from distflow.documents.urls import READ_ONLY, StorageUrl
from distflow.storage.base import Store
from distflow.storage.credentials import CredentialsFor, ambient
from distflow.storage.failures import driver_errors, no_credentials
from distflow.storage.folder import FolderStore
from distflow.storage.objects import open_objects
from distflow.storage.sftp import SftpStore
from distflow.storage.web import WebStore

__all__ = ["check_credentials", "open_store"]


def check_credentials(url: StorageUrl, credentials_for: CredentialsFor = ambient) -> None:
    """Raise ``StorageRefused`` when neither this user nor the driver's own chain has credentials for a URL of S3.

    The store is not asked. The other drivers cannot say it without their store.
    """
    if url.scheme != "s3" or credentials_for(url.profile) is not None:
        return
    with driver_errors(str(url)):
        found = importlib.import_module("botocore.session").Session().get_credentials()
    if found is None:
        raise no_credentials(str(url), "neither a credential of distflow nor variables, files or roles for AWS were found")


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
