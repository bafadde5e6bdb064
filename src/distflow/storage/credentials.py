"""Who we are to a store: the one seam between URLs and wherever credentials are kept."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from distflow.shell import Secret

__all__ = ["Credentials", "CredentialsFor", "ambient"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Credentials:
    """What one profile (``s3://bucket``) is reached with; OSMO's fields of a DATA credential."""

    access_key_id: str
    """Of ``s3`` and ``gs`` the key's id; of ``az`` and ``azure`` the account."""
    access_key: Secret
    """The key itself; of ``az`` and ``azure`` also a whole connection string."""
    override_url: str | None = None
    """Of a service that speaks S3 elsewhere, such as ``https://minio.example:9000``."""
    region: str | None = None
    addressing_style: Literal["virtual", "path", "auto"] | None = None
    """Whether the bucket stands in the host's name or in the path; ``None``: as the driver finds best."""


CredentialsFor = Callable[[str], Credentials | None]
"""Takes a URL's profile and returns its credentials; ``None``: what the environment and the driver's own chain give."""


def ambient(profile: str) -> Credentials | None:  # noqa: ARG001  the signature of a ``CredentialsFor``
    """Leave it to the environment and the driver's own chain (files, instance roles)."""
    return None
