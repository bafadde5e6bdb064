"""Object stores with a driver of fsspec: S3 and compatible services, Google Cloud Storage, Azure Blob Storage."""

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
from distflow.storage.base import PART_BYTES, Entry, Sink, part_size
from distflow.storage.credentials import NO_DRIVER, SECRET_VARIABLES, Credentials, Driver, driver_of
from distflow.storage.failures import driver_errors, local_errors

__all__ = ["ObjectStore", "open_objects"]

_PACKAGES = {"s3": "s3fs", "gcs": "gcsfs", "abfs": "adlfs"}
_PARTS_AT_ONCE = 4
_PROBE = ".distflow-check"


def open_objects(url: StorageUrl, credentials: Credentials | None) -> ObjectStore:
    """Return the store of a URL's container, without a request to it.

    Raises ``InputError`` if the driver is not installed, and ``StorageError`` if the driver cannot be created, for example
    without credentials.
    """
    driver = driver_of(url, credentials)
    try:
        importlib.import_module(_PACKAGES[driver.name])
        fsspec = importlib.import_module("fsspec")
    except ImportError as error:
        raise InputError(f"{url.scheme}:// needs a driver that is not installed: {error}", hint=NO_DRIVER) from error
    # asyncio would log a driver's canceled coroutine with its arguments.
    logging.getLogger("asyncio").setLevel(logging.CRITICAL)
    secrets = [credentials.access_key] if credentials is not None else []
    secrets += [Secret(os.environ[name]) for name in SECRET_VARIABLES if os.environ.get(name)]
    options = dict(driver.options)
    if driver.speaks_s3:
        options["session"] = _s3_session()
    with driver_errors(url.profile, secrets):
        files = fsspec.filesystem(driver.name, skip_instance_cache=True, use_listings_cache=False, **options)
    files.retries = 1
    return ObjectStore(url, driver, files, secrets)


def _s3_session() -> Any:
    """Return a session of aiobotocore that sends no ``Expect: 100-continue``.

    aiohttp waits without a timeout for the response ``100 Continue``. If the server sends its final response instead, the
    upload would wait forever.
    """
    session = importlib.import_module("aiobotocore.session").AioSession()
    session.unregister("before-call.s3", importlib.import_module("botocore.handlers").add_expect_header)
    return session


class ObjectStore:
    """One container, accessed through a driver (contract: ``storage.base.DataStore``)."""

    def __init__(self, url: StorageUrl, driver: Driver, files: Any, secrets: Sequence[Secret]) -> None:
        """Use the driver's file system ``files``."""
        self._url = url
        self._driver = driver
        self._files = files
        self._secrets = secrets
        # Azure's driver takes the account as an option, not as a part of its paths.
        self._container = url.container.rpartition("/")[2]

    def find(self, key: str) -> Sequence[Entry]:
        """Return the objects at a key and below it."""
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
        """Return the same as ``find``: object stores have no links."""
        return self.find(key)

    def stat(self, key: str) -> Entry:
        """Return the metadata of one object."""
        with self._errors(key):
            if self._driver.speaks_s3:
                return self._head(key)
            info = self._files.info(self._path(key))
        if info.get("type") == "directory":
            raise StorageMissing(f"{self._url.shown(key)}: there is no such object")
        return self._entry(info)

    def read(self, entry: Entry, start: int, sink: Sink) -> None:
        """Pass the content from byte ``start`` to ``sink``."""
        at = start
        while at < entry.size:
            with self._errors(entry.key):
                piece = self._files.cat_file(self._path(entry.key), start=at, end=min(at + PART_BYTES, entry.size))
            if not piece:
                raise StorageUnreachable(f"{self._url.shown(entry.key)}: the content ended at byte {at:,} of {entry.size:,}")
            sink(piece)
            at += len(piece)

    def write(self, key: str, source: Path, on_bytes: Callable[[int], None]) -> None:
        """Upload a file."""
        options: dict[str, Any] = {}
        if self._driver.speaks_s3:
            with local_errors(source):
                options = {"chunksize": part_size(source.stat().st_size), "max_concurrency": _PARTS_AT_ONCE}
        with self._errors(key):
            self._files.put_file(str(source), self._path(key), callback=_callback(on_bytes), **options)

    def delete(self, key: str, *, top: str = "") -> None:  # noqa: ARG002  object stores have no links
        """Remove an object."""
        try:
            with self._errors(key):
                self._files.rm_file(self._path(key))
        except StorageMissing:
            self._check_container()

    def check_readable(self, key: str) -> None:
        """List at most one object of S3. Other drivers cannot limit a list, so list all objects below the key."""
        with self._errors(key):
            if self._driver.speaks_s3:
                self._files.call_s3("list_objects_v2", Bucket=self._container, Prefix=key, MaxKeys=1)
                return
        self.find(key)

    def check_writable(self, key: str) -> None:
        """Write an empty object, and remove it."""
        probe = f"{key}/{_PROBE}" if key else _PROBE
        with self._errors(probe):
            self._files.pipe_file(self._path(probe), b"")
        self.delete(probe)

    def close(self) -> None:
        """Do nothing: drivers close their connections when they are garbage-collected."""

    def _check_container(self) -> None:
        """Raise ``StorageMissing`` when the container itself does not exist."""
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
            key=name.partition("/")[2], size=int(info.get("size") or 0), tag=tag, md5=_md5(info, tag), modified=_seconds(at),
        )  # fmt: skip

    def _head(self, key: str) -> Entry:
        """Return the metadata of an S3 object. Its headers show how it is encrypted, and so whether its ETag is a checksum."""
        found = self._files.call_s3("head_object", Bucket=self._container, Key=key)
        tag = str(found.get("ETag") or "").strip('"')
        # The ETag of an object that is encrypted with KMS or a customer's key is not a checksum.
        is_checksum = (
            not str(found.get("ServerSideEncryption") or "").startswith("aws:") and "SSECustomerAlgorithm" not in found
        )
        return Entry(
            key=key, size=int(found["ContentLength"]), tag=tag, md5=_etag_md5(tag) if is_checksum else "",
            modified=_seconds(found.get("LastModified")),
        )  # fmt: skip


def _md5(info: dict[str, Any], tag: str) -> str:
    if "ETag" in info:
        return _etag_md5(tag)
    if "md5Hash" in info:
        return base64.b64decode(info["md5Hash"]).hex()
    settings = info.get("content_settings") or {}
    digest = settings.get("content_md5") if hasattr(settings, "get") else None
    return bytes(digest).hex() if digest else ""


def _etag_md5(tag: str) -> str:
    digest, _, parts = tag.partition("-")
    is_checksum = len(digest) == 32 and not digest.strip("0123456789abcdef") and (parts.isdigit() or not parts)
    return tag if is_checksum else ""


def _seconds(at: object) -> float | None:
    if isinstance(at, str):
        try:
            at = datetime.fromisoformat(at.replace("Z", "+00:00"))
        except ValueError:
            return None
    return at.timestamp() if isinstance(at, datetime) else None


def _callback(on_bytes: Callable[[int], None]) -> Any:
    """Return a callback of fsspec that passes the number of bytes of each part to ``on_bytes``."""
    kind = importlib.import_module("fsspec.callbacks").Callback

    class PartCallback(kind):  # type: ignore[misc, valid-type]
        """Reports each part."""

        def relative_update(self, inc: int = 1) -> None:
            on_bytes(inc)

    return PartCallback()
