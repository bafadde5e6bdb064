"""This user's credentials on this machine: secrets that tasks are given by name."""

from __future__ import annotations

from collections.abc import Mapping

from distflow.client.client import Client
from distflow.shell import Secret
from distflow.state.credentials import LONGEST_VALUE, Credential, Credentials, CredentialType

__all__ = [
    "LONGEST_VALUE",
    "Credential",
    "CredentialType",
    "Secret",
    "delete_credential",
    "list_credentials",
    "set_credential",
]


def set_credential(client: Client, name: str, kind: CredentialType, payload: Mapping[str, Secret]) -> Credential:
    """Keep values under a name, in place of those of before. Raises ``InputError`` for what cannot be a credential."""
    return Credentials(client.writable_directory().credentials).set(name, kind, dict(payload))


def list_credentials(client: Client) -> list[Credential]:
    """Return the credentials."""
    return list(Credentials(client.directory.credentials).all())


def delete_credential(client: Client, name: str) -> None:
    """Forget a credential; workflows that were submitted before keep what they were given. Raises ``NotFound``."""
    Credentials(client.directory.credentials).delete(name)
