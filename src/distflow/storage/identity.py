"""Who we are to a store, in a form that a node can be told: over a pipe, for one transfer, kept by nobody. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from distflow.documents.urls import StorageUrl
from distflow.shell import Secret, revealed
from distflow.storage.credentials import Credentials

__all__ = ["DRIVERS_VARIABLES", "SECRET_VARIABLES", "Identity", "identity_of"]

DRIVERS_VARIABLES = ("AWS_", "AZURE_", "GOOGLE_")
"""How the names of variables begin that drivers read by themselves."""

SECRET_VARIABLES = (
    "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AZURE_STORAGE_ACCOUNT_KEY", "AZURE_STORAGE_CONNECTION_STRING",
)  # fmt: skip
"""Those of them whose values must not be seen."""

_WHERE = ("AWS_REGION", "AWS_DEFAULT_REGION", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3")
_WHO = {
    "s3": ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"),
    "az": ("AZURE_STORAGE_CONNECTION_STRING", "AZURE_STORAGE_ACCOUNT_NAME", "AZURE_STORAGE_ACCOUNT_KEY"),
}
_ENOUGH = ("AWS_SECRET_ACCESS_KEY", "AZURE_STORAGE_CONNECTION_STRING", "AZURE_STORAGE_ACCOUNT_KEY")
"""An environment with one of them says who we are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Credentials, or variables that say the same."""

    credentials: Credentials | None = None
    environment: Mapping[str, Secret]

    @property
    def secrets(self) -> Sequence[Secret]:
        """What must not be shown."""
        own = [self.credentials.access_key] if self.credentials is not None else []
        return [*own, *(value for name, value in self.environment.items() if name in SECRET_VARIABLES)]

    def revealed(self) -> dict[str, Any]:
        """Return it for the node's end (``storage.onnode``), which reads it with ``told``."""
        one = self.credentials
        fields = None
        if one is not None:
            fields = {
                "access_key_id": one.access_key_id, "access_key": one.access_key.reveal(), "override_url": one.override_url,
                "region": one.region, "addressing_style": one.addressing_style,
            }  # fmt: skip
        return {"credentials": fields, "environment": revealed(self.environment)}

    @classmethod
    def told(cls, fields: Mapping[str, Any]) -> Identity:
        """Return what ``revealed`` gave."""
        one = fields["credentials"]
        environment = {name: Secret(value) for name, value in fields["environment"].items()}
        if one is None:
            return cls(environment=environment)
        return cls(credentials=Credentials(**{**one, "access_key": Secret(one["access_key"])}), environment=environment)


def identity_of(url: StorageUrl, credentials: Credentials | None, environ: Mapping[str, str]) -> Identity | None:
    """Return who we are to a store; ``None`` when that lies in files or roles of this machine, which no node has."""
    where = {name: Secret(environ[name]) for name in _WHERE if environ.get(name)}
    if credentials is not None:
        return Identity(credentials=credentials, environment=where)
    names = _WHO.get({"azure": "az"}.get(url.scheme, url.scheme), ())
    who = {name: Secret(environ[name]) for name in names if environ.get(name)}
    if environ.get("AWS_PROFILE") or not any(name in who for name in _ENOUGH):
        return None
    return Identity(environment=where | who)
