"""Which driver of fsspec a URL needs, and what it is told. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from distflow.documents.urls import StorageUrl
from distflow.storage.credentials import Credentials

__all__ = ["NO_DRIVER", "Driver", "driver_of", "package_of"]

NO_DRIVER = "pip install 'distflow[data]'"
"""What to do where a driver is not installed."""

_CONNECT_S, _READ_S = 10, 60
_PACKAGES = {"s3": "s3fs", "gs": "gcsfs", "az": "adlfs", "azure": "adlfs"}
_GOOGLE = "https://storage.googleapis.com"
"""Where Google's store speaks S3, for keys with an id and a secret."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Driver:
    """A driver and its options."""

    name: str
    """As fsspec calls it."""
    options: Mapping[str, Any]
    """Holds secrets: never to be shown."""

    @property
    def speaks_s3(self) -> bool:
        """Whether the store is asked in S3's language."""
        return self.name == "s3"


def package_of(url: StorageUrl) -> str:
    """Return the package that a URL needs beside distflow itself; empty: none."""
    return _PACKAGES.get(url.scheme, "")


def driver_of(url: StorageUrl, credentials: Credentials | None) -> Driver:
    """Return the driver for a URL of ``s3``, ``gs``, ``az`` or ``azure``."""
    if url.scheme == "s3":
        return _s3(credentials, credentials.override_url if credentials else None)
    if url.scheme == "gs":
        if credentials is not None:
            return _s3(credentials, credentials.override_url or _GOOGLE)
        return Driver(name="gcs", options={})
    return _azure(url, credentials)


def _s3(credentials: Credentials | None, endpoint: str | None) -> Driver:
    config: dict[str, Any] = {
        # Tries are counted once, in `trying`.
        "retries": {"total_max_attempts": 1},
        "connect_timeout": _CONNECT_S,
        "read_timeout": _READ_S,
        # Not every service that speaks S3 has Amazon's newer sums; what arrives is held against its MD5.
        "request_checksum_calculation": "when_required",
        "response_checksum_validation": "when_required",
    }
    options: dict[str, Any] = {"config_kwargs": config}
    if credentials is not None:
        options |= {"key": credentials.access_key_id, "secret": credentials.access_key.reveal()}
        if credentials.addressing_style:
            config["s3"] = {"addressing_style": credentials.addressing_style}
        if credentials.region:
            options["client_kwargs"] = {"region_name": credentials.region}
    if endpoint:
        options["endpoint_url"] = endpoint
    return Driver(name="s3", options=options)


def _azure(url: StorageUrl, credentials: Credentials | None) -> Driver:
    options: dict[str, Any] = {}
    if url.scheme == "azure":
        options["account_name"] = url.container.partition("/")[0]
    if credentials is not None:
        key = credentials.access_key.reveal()
        if "AccountKey=" in key:
            options["connection_string"] = key
        else:
            options |= {"account_name": options.get("account_name", credentials.access_key_id), "account_key": key}
    return Driver(name="abfs", options=options)
