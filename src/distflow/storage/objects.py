"""Stores that fsspec has a driver for: S3 and what speaks it, Google's, Azure's."""

from __future__ import annotations

import base64
import importlib
import logging
import os
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from distflow.documents.urls import StorageUrl
from distflow.errors import InputError, StorageMissing, StorageUnreachable
from distflow.shell import Secret
from distflow.storage.base import PART_BYTES, Entry, Sink
from distflow.storage.credentials import Credentials
from distflow.storage.failures import driver_errors
from distflow.storage.identity import SECRET_VARIABLES
from distflow.storage.options import NO_DRIVER, Driver, driver_of

__all__ = ["ObjectStore", "open_objects", "part_size"]

_PACKAGES = {"s3": "s3fs", "gcs": "gcsfs", "abfs": "adlfs"}
_MOST_PARTS = 9000
"""S3 takes 10 000 for one object."""
_PARTS_AT_ONCE = 4
_PROBE = ".distflow-check"


def open_objects(url: StorageUrl, credentials: Credentials | None) -> ObjectStore:
    """Open the container that a URL names; nothing is asked yet. Raises ``InputError`` when the driver is not installed."""
    driver = driver_of(url, credentials)
    try:
        importlib.import_module(_PACKAGES[driver.name])
        fsspec = importlib.import_module("fsspec")
    except ImportError as error:
        raise InputError(f"{url.scheme}:// needs a driver that is not installed here: {error}", hint=NO_DRIVER) from error
    # A coroutine of a driver that was cut off is told of there, with its arguments.
    logging.getLogger("asyncio").setLevel(logging.CRITICAL)
    secrets = [credentials.access_key] if credentials is not None else []
    secrets += [Secret(os.environ[name]) for name in SECRET_VARIABLES if os.environ.get(name)]
    with driver_errors(url.profile, secrets):
        files = fsspec.filesystem(driver.name, skip_instance_cache=True, use_listings_cache=False, **driver.options)
    files.retries = 1
    return ObjectStore(url, driver, files, secrets)


class ObjectStore:
    """One container behind a driver (contract: ``storage.base.Store``)."""

    def __init__(self, url: StorageUrl, driver: Driver, files: Any, secrets: Sequence[Secret]) -> None:
        """Take the driver's file system."""
        self._url = url
        self._driver = driver
        self._files = files
        self._secrets = secrets
        # The account is an option of Azure's driver, not a part of its paths.
        self._container = url.container.rpartition("/")[2]

    def find(self, key: str) -> Sequence[Entry]:
        """Return what is at a key and below it."""
        with self._errors(key):
            below = self._files.find(self._path(key), detail=True)
        found = {entry.key: entry for info in below.values() if (entry := self._entry(info)).key != key}
        if key:
            try:
                found[key] = self.stat(key)
            except StorageMissing:
                pass
        return list(found.values())

    def find_removable(self, key: str) -> Sequence[Entry]:
        """Return the same as ``find``: these stores have no links."""
        return self.find(key)

    def stat(self, key: str) -> Entry:
        """Return one object."""
        with self._errors(key):
            if self._driver.speaks_s3:
                return self._head(key)
            info = self._files.info(self._path(key))
        if info.get("type") == "directory":
            raise StorageMissing(f"{self._url.shown(key)}: there is no such object")
        return self._entry(info)

    def read(self, entry: Entry, start: int, sink: Sink) -> None:
        """Give the content from ``start`` on to ``sink``."""
        at = start
        while at < entry.size:
            with self._errors(entry.key):
                piece = self._files.cat_file(self._path(entry.key), start=at, end=min(at + PART_BYTES, entry.size))
            if not piece:
                raise StorageUnreachable(f"{self._url.shown(entry.key)}: it ends at byte {at:,} of {entry.size:,}")
            sink(piece)
            at += len(piece)

    def write(self, key: str, source: Path, told: Callable[[int], None]) -> None:
        """Put a file there."""
        options: dict[str, Any] = {}
        if self._driver.speaks_s3:
            options = {"chunksize": part_size(source.stat().st_size), "max_concurrency": _PARTS_AT_ONCE}
        with self._errors(key):
            self._files.put_file(str(source), self._path(key), callback=_callback(told), **options)

    def delete(self, key: str, *, top: str = "") -> None:  # noqa: ARG002  these stores have no links
        """Remove an object."""
        try:
            with self._errors(key):
                self._files.rm_file(self._path(key))
        except StorageMissing:
            self._list_once()

    def check_readable(self, key: str) -> None:
        """List a little."""
        with self._errors(key):
            if self._driver.speaks_s3:
                self._files.call_s3("list_objects_v2", Bucket=self._container, Prefix=key, MaxKeys=1)
                return
        self.find(key)

    def check_writable(self, key: str) -> None:
        """Write an empty object and remove it."""
        probe = f"{key}/{_PROBE}" if key else _PROBE
        with self._errors(probe):
            self._files.pipe_file(self._path(probe), b"")
        self.delete(probe)

    def close(self) -> None:
        """Nothing is held: drivers hang up when they are forgotten."""

    def _list_once(self) -> None:
        """Raise when the container itself is missing."""
        with self._errors(""):
            self._files.ls(self._container, detail=False)

    def _errors(self, key: str) -> Any:
        return driver_errors(self._url.shown(key), self._secrets)

    def _path(self, key: str) -> str:
        return f"{self._container}/{key}" if key else self._container

    def _entry(self, info: dict[str, Any]) -> Entry:
        name = str(info["name"])
        tag = str(info.get("ETag") or info.get("etag") or info.get("generation") or "").strip('"')
        at = info.get("LastModified") or info.get("last_modified") or info.get("mtime") or info.get("updated")
        return Entry(
            key=name.partition("/")[2], size=int(info.get("size") or 0), mark=tag, md5=_md5(info, tag), modified=_seconds(at),
        )  # fmt: skip

    def _head(self, key: str) -> Entry:
        """Ask S3 for one object: it says of the tag whether it is a sum of the content."""
        found = self._files.call_s3("head_object", Bucket=self._container, Key=key)
        tag = str(found.get("ETag") or "").strip('"')
        # With keys of the service's own, or of ours, the tag is no sum.
        is_sum = not str(found.get("ServerSideEncryption") or "").startswith("aws:") and "SSECustomerAlgorithm" not in found
        return Entry(
            key=key, size=int(found["ContentLength"]), mark=tag, md5=_tag_sum(tag) if is_sum else "",
            modified=_seconds(found.get("LastModified")),
        )  # fmt: skip


def part_size(size: int) -> int:
    """Return the bytes of one part of an object that is written in parts."""
    return max(PART_BYTES, -(-size // _MOST_PARTS))


def _md5(info: dict[str, Any], tag: str) -> str:
    if "ETag" in info:
        return _tag_sum(tag)
    if "md5Hash" in info:
        return base64.b64decode(info["md5Hash"]).hex()
    settings = info.get("content_settings") or {}
    given = settings.get("content_md5") if hasattr(settings, "get") else None
    return bytes(given).hex() if given else ""


def _tag_sum(tag: str) -> str:
    digest, _, parts = tag.partition("-")
    is_sum = len(digest) == 32 and not digest.strip("0123456789abcdef") and (parts.isdigit() or not parts)
    return tag if is_sum else ""


def _seconds(at: object) -> float | None:
    if isinstance(at, str):
        try:
            at = datetime.fromisoformat(at.replace("Z", "+00:00"))
        except ValueError:
            return None
    return at.timestamp() if isinstance(at, datetime) else None


def _callback(told: Callable[[int], None]) -> Any:
    """Return a callback of fsspec's that hears of every part."""
    kind = importlib.import_module("fsspec.callbacks").Callback

    class Telling(kind):  # type: ignore[misc, valid-type]
        """Passes on what was added."""

        def relative_update(self, inc: int = 1) -> None:
            told(inc)

    return Telling()
