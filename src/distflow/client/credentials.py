"""Set, list and delete this user's credentials on this machine. Tasks refer to credentials by name."""

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
    """Store a credential, replacing an existing one of the same name.

    Args:
        client: The client whose state directory stores the credential.
        name: The name of the credential.
        kind: Its type.
        payload: Its values by key.

    Returns:
        The stored credential.

    Raises:
        InputError: if the name or the payload is not valid for this type.
        StateError: if the state directory is not writable.

    """
    return Credentials(client.writable_directory().credentials).set(name, kind, dict(payload))


def list_credentials(client: Client) -> list[Credential]:
    """Return all credentials of this user. Raises ``StateError`` if they cannot be read."""
    return list(Credentials(client.directory.credentials).all())


def delete_credential(client: Client, name: str) -> None:
    """Delete a credential. Workflows that were submitted earlier keep their copies of its values.

    Args:
        client: The client whose state directory has the credential.
        name: The name of the credential.

    Raises:
        NotFound: if the credential does not exist.
        StateError: if the state directory is not writable.

    """
    Credentials(client.directory.credentials).delete(name)
