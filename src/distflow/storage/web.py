"""Web servers as a read-only store, for ``http://`` and ``https://``: each URL is one object."""

from __future__ import annotations

import contextlib
import email.utils
import http.client
import re
import string
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from distflow.documents.urls import StorageUrl
from distflow.errors import InputError, StorageError, StorageMissing, StorageRefused, StorageUnreachable
from distflow.storage.base import Entry, Sink

__all__ = ["WebStore"]

_PIECE_BYTES = 1 << 20
_TIMEOUT_S = 60.0
_TRANSIENT = {408, 425, 429}
"""Status codes below 500 after which a retry may succeed. After any code from 500, a retry may succeed, too."""


class WebStore:
    """The one URL that the store was opened with (contract: ``storage.base.DataStore``)."""

    def __init__(self, url: StorageUrl) -> None:
        """Store the URL, without a request. Raises ``InputError`` for a URL that does not name a file."""
        if not url.key or url.is_folder:
            raise InputError(f"{url}: a web server does not list its files", hint="name one file")
        self._url = url
        path = urllib.parse.quote(url.key, safe="/%:@!$&'()*+,;=~-._")
        # Python's client would refuse a space, with an error that shows the query, which may be a signature.
        query = urllib.parse.quote(url.query, safe=string.punctuation)
        self._address = f"{url.scheme}://{url.container}/{path}" + (f"?{query}" if query else "")

    def find(self, key: str) -> Sequence[Entry]:
        """Return the file. Raises ``StorageMissing`` when it does not exist, because a URL cannot be an empty directory."""
        return [self.stat(key)]

    def stat(self, key: str) -> Entry:
        """Return the file as the server describes it. Raises ``StorageError`` when the size of its content is not known."""
        # Use GET, because a server would refuse HEAD for a URL that is signed for GET.
        with self._get({}) as response:
            size = response.headers.get("Content-Length", "")
            if not re.fullmatch("[0-9]{1,18}", size) or response.headers.get("Content-Encoding", "identity") != "identity":
                raise StorageError(
                    f"{self._url}: the server does not report the uncompressed size of the file,"
                    " so a truncated download would go unnoticed",
                    hint="use a server that sends `Content-Length` without compression, or another store, such as `s3://`",
                )
            tag = response.headers.get("ETag") or response.headers.get("Last-Modified") or ""
            return Entry(key=key, size=int(size), tag=tag, modified=_timestamp(response.headers.get("Last-Modified")))

    def read(self, entry: Entry, start: int, sink: Sink) -> None:
        """Pass the content from byte ``start`` to ``sink``. Skip the bytes before ``start`` if the server ignores ``Range``."""
        with self._get({"Range": f"bytes={start}-"} if start else {}) as response:
            skip = start if response.status != http.client.PARTIAL_CONTENT else 0
            while True:
                with self._errors():
                    piece = response.read(_PIECE_BYTES)
                if not piece:
                    return
                passed, skip = piece[:skip], max(0, skip - len(piece))
                if len(passed) < len(piece):
                    sink(piece[len(passed) :])

    def write(self, key: str, source: Path, on_bytes: Callable[[int], None]) -> None:
        """Raise ``InputError``: a web server is read-only."""
        raise self._read_only()

    def find_removable(self, key: str) -> Sequence[Entry]:
        """Raise ``InputError``: a web server is read-only."""
        raise self._read_only()

    def delete(self, key: str, *, top: str = "") -> None:
        """Raise ``InputError``: a web server is read-only."""
        raise self._read_only()

    def check_readable(self, key: str) -> None:
        """Request the file."""
        self.find(key)

    def check_writable(self, key: str) -> None:
        """Raise ``InputError``: a web server is read-only."""
        raise self._read_only()

    def close(self) -> None:
        """Do nothing: each request has its own connection."""

    def _read_only(self) -> InputError:
        return InputError(
            f"cannot write to {self._url}: web servers can only be read", hint="use storage such as s3:// or sftp://"
        )

    @contextlib.contextmanager
    def _get(self, headers: dict[str, str]) -> Iterator[Any]:
        with self._errors():
            request = urllib.request.Request(self._address, headers={"Accept-Encoding": "identity", **headers})  # noqa: S310
            response = urllib.request.urlopen(request, timeout=_TIMEOUT_S)  # noqa: S310  only http and https
        try:
            yield response
        finally:
            response.close()

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except urllib.error.HTTPError as error:
            text = f"{self._url}: the server answered {error.code} {error.reason}"
            error.close()
            if error.code in (401, 403):
                raise StorageRefused(text, hint="use a file that needs no login, or a URL with a valid signature") from None
            if error.code in (404, 410):
                raise StorageMissing(text) from None
            kind = StorageUnreachable if error.code in _TRANSIENT or error.code >= 500 else StorageError
            raise kind(text) from None
        except (OSError, http.client.HTTPException, ValueError) as error:
            reason = getattr(error, "reason", None) or error
            message = f"{self._url}: {str(reason) or type(error).__name__}"
            raise StorageUnreachable(message, hint="check the URL and the network") from None


def _timestamp(text: str | None) -> float | None:
    if text is None:
        return None
    try:
        return email.utils.parsedate_to_datetime(text).timestamp()
    except ValueError:
        return None
