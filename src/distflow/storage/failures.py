"""Convert the exceptions of drivers to errors of distflow, and retry requests to stores.

Exceptions of drivers are recognized by their class names and codes, so that no driver has to be imported.
"""

from __future__ import annotations

import errno
import os
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

from distflow.errors import DistflowError, StorageError, StorageMissing, StorageRefused, StorageUnreachable
from distflow.shell import Secret, mask

__all__ = ["Retries", "TransferCanceled", "driver_errors", "local_errors", "no_credentials"]

_NO_KEYS = {
    "NoCredentialsError", "PartialCredentialsError", "CredentialRetrievalError", "ProfileNotFound", "TokenRetrievalError",
    "DefaultCredentialsError", "RefreshError",
}  # fmt: skip
_AZURE_WITHOUT_KEYS = "Must provide either a connection_string or account_name"
"""Azure's driver raises a ``ValueError`` with this text if it has no credentials."""
_REFUSED = {"PermissionError", "ClientAuthenticationError", "AuthenticationRequiredError"}
_MISSING = {"FileNotFoundError", "ResourceNotFoundError", "NoSuchBucket", "NoSuchKey"}
_INVALID = {"ParamValidationError", "InvalidRegionError", "InvalidEndpointDiscoveryConfigurationError"}
_INVALID_NUMBERS = {errno.EINVAL, errno.ENAMETOOLONG, errno.EPERM, errno.ENOSYS, errno.EMSGSIZE}
_KEYS_HINTS = {
    "s3": "store them with `distflow credential set NAME --type DATA` (docs/credentials.md), or set AWS_ACCESS_KEY_ID and"
    " AWS_SECRET_ACCESS_KEY (and AWS_ENDPOINT_URL where the store is not Amazon's)",
    "gs": "set GOOGLE_APPLICATION_CREDENTIALS to a key file, or sign in with gcloud",
    "az": "set AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY, or AZURE_STORAGE_CONNECTION_STRING",
    "azure": "set AZURE_STORAGE_ACCOUNT_KEY, or AZURE_STORAGE_CONNECTION_STRING",
}

_PAUSES_S = (0.5, 1.0, 2.0, 4.0)
"""Five attempts, as in OSMO."""

_R = TypeVar("_R")


class TransferCanceled(Exception):
    """The transfer was canceled, or another of its files failed."""


class Retries:
    """Repeats the requests of a transfer while the store is unreachable, unless the transfer is canceled."""

    def __init__(self, canceled: threading.Event | None = None, pauses_s: Sequence[float] = _PAUSES_S) -> None:
        """Wait ``pauses_s`` between attempts. ``canceled`` cancels the transfer.

        With n pauses, a request fails after n + 1 attempts in succession without progress (``transferred`` of ``call``).
        """
        self.canceled = canceled or threading.Event()
        self._pauses_s = pauses_s

    def check(self) -> None:
        """Raise ``TransferCanceled`` if the transfer was canceled."""
        if self.canceled.is_set():
            raise TransferCanceled

    def call(self, request: Callable[[], _R], transferred: Callable[[], int] = lambda: 0) -> _R:
        """Return the result of ``request``, after retries if the store is unreachable.

        An attempt after which ``transferred`` has grown resets the count of failures. Raises the error of the last attempt, or
        ``TransferCanceled``.
        """
        failures, before = 0, transferred()
        while True:
            self.check()
            try:
                return request()
            except StorageUnreachable as error:
                failures = 0 if transferred() > before else failures + 1
                before = transferred()
                if failures > len(self._pauses_s):
                    error.message = f"{error.message} (tried {'once' if failures == 1 else f'{failures} times'})"
                    raise
                self.canceled.wait(self._pauses_s[max(0, failures - 1)] if self._pauses_s else 0.0)


@contextmanager
def driver_errors(where: str, secrets: Sequence[Secret] = ()) -> Iterator[None]:
    """Convert any exception of a driver to a ``StorageError`` that names ``where``, a URL in its printable form.

    Errors of distflow and ``TransferCanceled`` pass through unchanged.
    """
    try:
        yield
    except (DistflowError, TransferCanceled):
        raise
    except Exception as error:  # noqa: BLE001  drivers raise the exceptions of many libraries
        raise _storage_error(error, where, lambda text: mask(text, secrets)) from None


@contextmanager
def local_errors(path: str | os.PathLike[str]) -> Iterator[None]:
    """Convert the operating system's errors about a local file to ``StorageError``."""
    try:
        yield
    except OSError as error:
        hint = "free space there, or choose another directory" if error.errno in (errno.ENOSPC, errno.EDQUOT) else ""
        named = error.filename if isinstance(error.filename, str) else os.fspath(path)
        raise StorageError(f"{named}: {error.strerror or error}", hint=hint) from error


def no_credentials(where: str, reason: str) -> StorageRefused:
    """Return the error for a URL, in its printable form, for which this user has no usable credentials."""
    return StorageRefused(
        f"{where}: there are no usable credentials for it: {reason}", hint=_KEYS_HINTS.get(where.partition(":")[0], "")
    )


def _storage_error(error: BaseException, where: str, masked: Callable[[str], str]) -> StorageError:
    names = {kind.__name__ for kind in type(error).__mro__}
    scheme = where.partition(":")[0]
    text = masked(_text_of(error))
    code = getattr(error, "code", None) or getattr(error, "status_code", None)
    if names & _NO_KEYS or _AZURE_WITHOUT_KEYS in text:
        return no_credentials(where, text)
    if names & _REFUSED or code in (401, 403):
        hint = f"check the credentials and their permissions; {_KEYS_HINTS[scheme]}" if scheme in _KEYS_HINTS else ""
        return StorageRefused(f"{where}: the store refused access: {text}", hint=hint)
    if names & _MISSING or code == 404:
        hint = "`distflow data list` shows the existing objects"
        what = {"sftp": "file or directory", "az": "container or object", "azure": "container or object"}
        return StorageMissing(f"{where}: there is no such {what.get(scheme, 'bucket or object')}", hint=hint)
    if names & _INVALID or getattr(error, "errno", None) in _INVALID_NUMBERS:
        hint = "check the URL, and the region and the address of the store"
        return StorageError(f"{where}: the store does not accept the request: {text}", hint=hint)
    if "ValueError" in names:  # for example an unusable setting, a refused certificate or a damaged response
        return StorageError(f"{where}: {text}")
    return StorageUnreachable(f"{where}: {text}", hint="check the network, the store's address, and its free space and quota")


def _text_of(error: BaseException) -> str:
    """Return the text of an error as one line of about 300 characters at most, without the queries of URLs (signatures)."""
    text = str(error) or type(error).__name__
    text = re.sub(r"\?[^\s'\")]*", "?…", " ".join(text.split()))
    text = re.sub(r"^\[Errno \d+\] ", "", text)
    return text if len(text) <= 300 else f"{text[:300]}…"
