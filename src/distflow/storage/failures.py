"""What drivers raise, as errors of distflow: what happened to which object, and what to do about it.

Drivers are known here by the names of their exceptions, so that none has to be imported.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from distflow.errors import DistflowError, StorageError, StorageMissing, StorageRefused, StorageUnreachable
from distflow.shell import Secret, mask

__all__ = ["Halted", "driver_errors", "local_errors", "no_credentials"]

_NO_KEYS = {
    "NoCredentialsError", "PartialCredentialsError", "CredentialRetrievalError", "ProfileNotFound", "TokenRetrievalError",
    "DefaultCredentialsError", "RefreshError",
}  # fmt: skip
_REFUSED = {"PermissionError", "ClientAuthenticationError", "AuthenticationRequiredError"}
_MISSING = {"FileNotFoundError", "ResourceNotFoundError", "NoSuchBucket", "NoSuchKey"}
_WRONG = {"ParamValidationError", "InvalidRegionError", "ValueError", "InvalidEndpointDiscoveryConfigurationError"}
_WRONG_NUMBERS = {errno.EINVAL, errno.ENAMETOOLONG, errno.EPERM, errno.ENOSYS, errno.EMSGSIZE}
_HINT_KEYS = {
    "s3": "store them with `distflow credential set NAME --type DATA` (docs/credentials.md), or set AWS_ACCESS_KEY_ID and"
    " AWS_SECRET_ACCESS_KEY (and AWS_ENDPOINT_URL where the store is not Amazon's)",
    "gs": "set GOOGLE_APPLICATION_CREDENTIALS to a key file, or sign in with gcloud",
    "az": "set AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY, or AZURE_STORAGE_CONNECTION_STRING",
    "azure": "set AZURE_STORAGE_ACCOUNT_KEY, or AZURE_STORAGE_CONNECTION_STRING",
}


class Halted(Exception):
    """Another transfer failed, or nobody waits for this one any more."""


@contextmanager
def driver_errors(where: str, secrets: Sequence[Secret] = ()) -> Iterator[None]:
    """Turn whatever a driver raises into a ``StorageError`` that names ``where``, an URL as it may be shown."""
    try:
        yield
    except (DistflowError, Halted):
        raise
    except Exception as error:  # noqa: BLE001  drivers raise what their many libraries raise
        raise _translated(error, where, lambda text: mask(text, secrets)) from None


@contextmanager
def local_errors(path: str | os.PathLike[str]) -> Iterator[None]:
    """Turn the operating system's errors about a file of this machine into ``StorageError``."""
    try:
        yield
    except OSError as error:
        hint = "free space there, or choose another place" if error.errno in (errno.ENOSPC, errno.EDQUOT) else ""
        named = error.filename if isinstance(error.filename, str) else os.fspath(path)
        raise StorageError(f"{named}: {error.strerror or error}", hint=hint) from error


def no_credentials(where: str, words: str) -> StorageRefused:
    """Return the error for a URL, as it may be shown, for which this user has no credentials at all."""
    return StorageRefused(
        f"{where}: there are no credentials for it: {words}", hint=_HINT_KEYS.get(where.partition(":")[0], "")
    )


def _translated(error: BaseException, where: str, masked: Callable[[str], str]) -> StorageError:
    names = {kind.__name__ for kind in type(error).__mro__}
    scheme = where.partition(":")[0]
    words = masked(_words(error))
    code = getattr(error, "code", None) or getattr(error, "status_code", None)
    if names & _NO_KEYS:
        return no_credentials(where, words)
    if names & _REFUSED or code in (401, 403):
        hint = f"check the credentials and what they allow; {_HINT_KEYS[scheme]}" if scheme in _HINT_KEYS else ""
        return StorageRefused(f"{where}: refused: {words}", hint=hint)
    if names & _MISSING or code == 404:
        return StorageMissing(f"{where}: there is no such bucket or object", hint="`distflow data list` shows what there is")
    if names & _WRONG or getattr(error, "errno", None) in _WRONG_NUMBERS:
        return StorageError(f"{where}: the store does not take it: {words}")
    return StorageUnreachable(f"{where}: {words}", hint="check the network, and the store's address")


def _words(error: BaseException) -> str:
    """Return one line of what an error says; signatures in addresses are cut off."""
    said = str(error) or type(error).__name__
    said = re.sub(r"\?[^\s'\")]*", "?…", " ".join(said.split()))
    said = re.sub(r"^\[Errno \d+\] ", "", said)
    return said if len(said) <= 300 else f"{said[:300]}…"
