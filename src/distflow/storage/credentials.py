"""Credentials for stores, their encoding for nodes, and the options of drivers that contain them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from distflow.documents.urls import StorageUrl
from distflow.shell import Secret, revealed

__all__ = [
    "DRIVER_VARIABLES", "NO_DRIVER", "SECRET_VARIABLES", "Credentials", "CredentialsFor", "Driver", "Identity",
    "ambient_credentials", "driver_of", "identity_of", "package_of",
]  # fmt: skip

NO_DRIVER = "pip install 'distflow-cli[data]'"
"""The hint for a driver that is not installed."""

DRIVER_VARIABLES = ("AWS_", "AZURE_", "GOOGLE_")
"""Prefixes of the environment variables that drivers read."""

SECRET_VARIABLES = (
    "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AZURE_STORAGE_ACCOUNT_KEY", "AZURE_STORAGE_CONNECTION_STRING",
    "AZURE_STORAGE_SAS_TOKEN", "AZURE_STORAGE_CLIENT_SECRET",
)  # fmt: skip
"""Variables of drivers whose values must not be shown."""

_LOCATION_VARIABLES = ("AWS_REGION", "AWS_DEFAULT_REGION", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3")
_KEY_VARIABLES = {
    "s3": ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"),
    "az": ("AZURE_STORAGE_CONNECTION_STRING", "AZURE_STORAGE_ACCOUNT_NAME", "AZURE_STORAGE_ACCOUNT_KEY"),
}
_SUFFICIENT = ("AWS_SECRET_ACCESS_KEY", "AZURE_STORAGE_CONNECTION_STRING", "AZURE_STORAGE_ACCOUNT_KEY")
"""At least one of these variables must be set, or a node gets no credentials from the environment.

distflow does not send other credentials to nodes, such as files, roles and Azure's SAS tokens."""

_CONNECT_S, _READ_S = 10, 60
_PACKAGES = {"s3": "s3fs", "gs": "gcsfs", "az": "adlfs", "azure": "adlfs"}
_GOOGLE_S3 = "https://storage.googleapis.com"
"""Google's endpoint for the S3 protocol, which takes keys with an id and a secret."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Credentials:
    """The credentials of one URL profile (``s3://bucket``), with the fields of OSMO's DATA credential."""

    access_key_id: str
    """The id of the key for ``s3`` and ``gs``; the account for ``az``. A URL of ``azure`` names its account itself."""
    access_key: Secret
    """The key itself; for ``az`` and ``azure``, the key or a whole connection string."""
    override_url: str | None = None
    """The endpoint of another service with the S3 protocol, such as ``https://minio.example:9000``."""
    region: str | None = None
    addressing_style: Literal["virtual", "path", "auto"] | None = None
    """Whether the bucket is in the host name or in the path; ``None``: the driver decides."""


CredentialsFor = Callable[[str], Credentials | None]
"""Takes a URL profile and returns its credentials; ``None``: use the environment, files and roles that the driver reads."""


def ambient_credentials(profile: str) -> Credentials | None:  # noqa: ARG001  the signature of a ``CredentialsFor``
    """Return ``None``: use the environment, files and roles that the driver reads."""
    return None


# -- credentials for a node -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Credentials, or environment variables with the same meaning, for one transfer by a node.

    They are sent through a pipe to one process of the node, which never writes them to a file.
    """

    credentials: Credentials | None = None
    environment: Mapping[str, Secret]

    @property
    def secrets(self) -> Sequence[Secret]:
        """The values that must not be shown."""
        own = [self.credentials.access_key] if self.credentials is not None else []
        return [*own, *(value for name, value in self.environment.items() if name in SECRET_VARIABLES)]

    def to_wire(self) -> dict[str, Any]:
        """Return it as JSON values, with its secrets in clear text, for ``storage.node_service``."""
        one = self.credentials
        fields = None
        if one is not None:
            fields = {
                "access_key_id": one.access_key_id, "access_key": one.access_key.reveal(), "override_url": one.override_url,
                "region": one.region, "addressing_style": one.addressing_style,
            }  # fmt: skip
        return {"credentials": fields, "environment": revealed(self.environment)}

    @classmethod
    def from_wire(cls, fields: Mapping[str, Any]) -> Identity:
        """Return the identity that ``to_wire`` encoded."""
        one = fields["credentials"]
        environment = {name: Secret(value) for name, value in fields["environment"].items()}
        if one is None:
            return cls(environment=environment)
        return cls(credentials=Credentials(**{**one, "access_key": Secret(one["access_key"])}), environment=environment)


def identity_of(url: StorageUrl, credentials: Credentials | None, environ: Mapping[str, str]) -> Identity | None:
    """Return an identity that a node can use.

    Returns ``None`` if there are no ``credentials`` and ``environ`` contains no secret key or connection string for the store.
    Keys for ``s3`` in ``environ`` do not count if ``AWS_PROFILE`` is set, because the profile's file is not sent to nodes.
    """
    location = {name: Secret(environ[name]) for name in _LOCATION_VARIABLES if environ.get(name)}
    if credentials is not None:
        return Identity(credentials=credentials, environment=location)
    names = _KEY_VARIABLES.get({"azure": "az"}.get(url.scheme, url.scheme), ())
    keys = {name: Secret(environ[name]) for name in names if environ.get(name)}
    if (url.scheme == "s3" and environ.get("AWS_PROFILE")) or not any(name in keys for name in _SUFFICIENT):
        return None
    return Identity(environment=location | keys)


# -- drivers of fsspec ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Driver:
    """A driver of fsspec and its options."""

    name: str
    """Its name in fsspec."""
    options: Mapping[str, Any]
    """Contains secrets: never show it."""

    @property
    def speaks_s3(self) -> bool:
        """Whether the driver uses the S3 protocol."""
        return self.name == "s3"


def package_of(url: StorageUrl, credentials: Credentials | None = None) -> str:
    """Return the package that a URL needs with these credentials in addition to distflow; empty if it needs none."""
    return _PACKAGES["s3"] if url.scheme == "gs" and credentials is not None else _PACKAGES.get(url.scheme, "")


def driver_of(url: StorageUrl, credentials: Credentials | None) -> Driver:
    """Return the driver for a URL of ``s3``, ``gs``, ``az`` or ``azure``."""
    if url.scheme == "s3":
        return _s3(credentials, credentials.override_url if credentials else None)
    if url.scheme == "gs":
        if credentials is not None:
            return _s3(credentials, credentials.override_url or _GOOGLE_S3)
        return Driver(name="gcs", options={})
    return _azure(url, credentials)


def _s3(credentials: Credentials | None, endpoint: str | None) -> Driver:
    config: dict[str, Any] = {
        # `failures.Retries` retries; two layers of retries would multiply.
        "retries": {"total_max_attempts": 1},
        "connect_timeout": _CONNECT_S,
        "read_timeout": _READ_S,
        # Not every service with the S3 protocol has Amazon's newer checksums. Downloads are checked against the object's MD5.
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
