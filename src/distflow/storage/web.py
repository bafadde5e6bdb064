"""Files of web servers, for ``http://`` and ``https://``: one URL is one object, to be read only."""

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

_AT_ONCE = 1 << 20
_TIMEOUT_S = 60.0
_AGAIN = {408, 425, 429}
"""Answers that may be another one later, beside those from 500 on."""


class WebStore:
    """One server (contract: ``storage.base.Store``); it is asked for the one URL that it was opened with."""

    def __init__(self, url: StorageUrl) -> None:
        """Ask nothing yet. Raises ``InputError`` for a URL that names no file."""
        if not url.key or url.is_folder:
            raise InputError(f"{url}: a web server has no list of its files", hint="name one file")
        self._url = url
        path = urllib.parse.quote(url.key, safe="/%:@!$&'()*+,;=~-._")
        # Python's client refuses a blank in it, and says all of it then: it may be a signature.
        query = urllib.parse.quote(url.query, safe=string.punctuation)
        self._address = f"{url.scheme}://{url.container}/{path}" + (f"?{query}" if query else "")

    def find(self, key: str) -> Sequence[Entry]:
        """Return the file. Raises ``StorageMissing`` when the server does not have it: it has no empty directories."""
        return [self.stat(key)]

    def stat(self, key: str) -> Entry:
        """Return the file as the server describes it. Raises ``StorageError`` when it does not tell its size."""
        # Not HEAD: what is signed for GET is refused then.
        with self._get({}) as answer:
            size = answer.headers.get("Content-Length", "")
            if not re.fullmatch("[0-9]{1,18}", size) or answer.headers.get("Content-Encoding", "identity") != "identity":
                raise StorageError(
                    f"{self._url}: the server does not tell the size of the file, so nobody can tell when it is whole"
                )
            mark = answer.headers.get("ETag") or answer.headers.get("Last-Modified") or ""
            return Entry(key=key, size=int(size), mark=mark, modified=_seconds(answer.headers.get("Last-Modified")))

    def read(self, entry: Entry, start: int, sink: Sink) -> None:
        """Give the content from ``start`` on to ``sink``; what came before is read again where the server cannot skip it."""
        with self._get({"Range": f"bytes={start}-"} if start else {}) as answer:
            skip = start if answer.status != http.client.PARTIAL_CONTENT else 0
            while True:
                with self._errors():
                    piece = answer.read(_AT_ONCE)
                if not piece:
                    return
                passed, skip = piece[:skip], max(0, skip - len(piece))
                if len(passed) < len(piece):
                    sink(piece[len(passed) :])

    def write(self, key: str, source: Path, told: Callable[[int], None]) -> None:
        """Refuse."""
        raise self._read_only()

    def find_removable(self, key: str) -> Sequence[Entry]:
        """Refuse."""
        raise self._read_only()

    def delete(self, key: str, *, top: str = "") -> None:
        """Refuse."""
        raise self._read_only()

    def check_readable(self, key: str) -> None:
        """List it."""
        self.find(key)

    def check_writable(self, key: str) -> None:
        """Refuse."""
        raise self._read_only()

    def close(self) -> None:
        """Nothing is held."""

    def _read_only(self) -> InputError:
        return InputError(f"{self._url}: {self._url.scheme}:// can only be read")

    @contextlib.contextmanager
    def _get(self, headers: dict[str, str]) -> Iterator[Any]:
        with self._errors():
            request = urllib.request.Request(self._address, headers={"Accept-Encoding": "identity", **headers})  # noqa: S310
            answer = urllib.request.urlopen(request, timeout=_TIMEOUT_S)  # noqa: S310  the schemes are those of SCHEMES
        try:
            yield answer
        finally:
            answer.close()

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except urllib.error.HTTPError as error:
            words = f"{self._url}: the server says {error.code} {error.reason}"
            error.close()
            if error.code in (401, 403):
                raise StorageRefused(words, hint="name a file that may be read without a login, or a signed URL") from None
            if error.code in (404, 410):
                raise StorageMissing(words) from None
            kind = StorageUnreachable if error.code in _AGAIN or error.code >= 500 else StorageError
            raise kind(words) from None
        except (OSError, http.client.HTTPException, ValueError) as error:
            reason = getattr(error, "reason", None) or error
            raise StorageUnreachable(f"{self._url}: {str(reason) or type(error).__name__}", hint="check the network") from None


def _seconds(text: str | None) -> float | None:
    if text is None:
        return None
    try:
        return email.utils.parsedate_to_datetime(text).timestamp()
    except ValueError:
        return None
