"""This user's credentials on this machine: set, list and delete them, and collect those that a workflow needs."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from contextlib import suppress

from distflow.client.client import Client
from distflow.documents.problems import Problem, Severity
from distflow.errors import InputError
from distflow.plan.credentials import credential_key, registry_key, registry_of
from distflow.plan.model import Plan
from distflow.pools.model import Pool
from distflow.shell import Secret
from distflow.spec.credentials import KnownCredential, check_credentials
from distflow.spec.model import WorkflowSpec
from distflow.state.credentials import LONGEST_VALUE, Credential, CredentialStore, CredentialType
from distflow.state.directory import StateDirectory, find_state_directory

__all__ = [
    "LONGEST_VALUE",
    "Credential",
    "CredentialType",
    "Secret",
    "credential_problems",
    "delete_credential",
    "gather_secrets",
    "list_credentials",
    "set_credential",
]


def set_credential(client: Client, name: str, kind: CredentialType, payload: Mapping[str, Secret]) -> Credential:
    """Store a credential.

    A DATA credential replaces the one for the same endpoint, such as ``s3://bucket``. A REGISTRY credential replaces the one
    for the same registry.

    Args:
        client: The client whose state directory stores the credential.
        name: The name of the credential.
        kind: Its type.
        payload: Its values by key.

    Returns:
        The stored credential.

    Raises:
        InputError: if the name or the payload is not valid for this type, or if another credential has the name.
        StateError: if the state directory is not writable.

    """
    return CredentialStore(client.writable_directory().credentials).set(name, kind, dict(payload))


def list_credentials(client: Client) -> list[Credential]:
    """Return all credentials of this user. Raises ``StateError`` if they cannot be read."""
    return list(CredentialStore(client.directory.credentials).all())


def delete_credential(client: Client, name: str) -> None:
    """Delete a credential.

    Workflows that were submitted earlier keep copies of GENERIC and REGISTRY credentials until they end, but not of DATA
    credentials.

    Args:
        client: The client whose state directory has the credential.
        name: The name of the credential.

    Raises:
        NotFound: if the credential does not exist.
        StateError: if the state directory is not writable.

    """
    CredentialStore(client.directory.credentials).delete(name)


_UNUSABLE_REASONS: Mapping[CredentialType, str] = {
    CredentialType.GENERIC: "",
    CredentialType.REGISTRY: "its type is REGISTRY, and distflow uses it for images automatically; remove it from the task",
    CredentialType.DATA: "its type is DATA, and distflow uses it for storage URLs automatically; remove it from the task",
}
"""The reason why a task cannot use credentials of a type; empty if it can."""


def credential_problems(client: Client, spec: WorkflowSpec, *, is_tolerant: bool = False) -> Sequence[Problem]:
    """Return a problem for each credential of a spec that does not exist, lacks a key, or has a type that tasks cannot use.

    Args:
        client: The client whose credentials the spec may use.
        spec: The spec.
        is_tolerant: Whether problems are only warnings if this machine has no credentials at all, like most CI machines.

    Raises:
        StateError: if the credentials cannot be read.

    """
    if not any(task.credentials for group in spec.groups for task in group.tasks):
        return ()
    known = {one.name: _known(one) for one in CredentialStore(find_state_directory(client.environ).credentials).all()}
    severity = Severity.WARNING if is_tolerant and not known else Severity.ERROR
    return check_credentials(spec, known, severity=severity)


def gather_secrets(plan: Plan, pool: Pool, directory: StateDirectory, secrets: Mapping[str, Secret]) -> dict[str, Secret]:
    """Return the ``secrets`` of a submission, the credentials of its tasks, and the logins for its container images.

    Logins are added if a node of the pool runs containers, for images whose name contains a registry.

    Raises ``InputError`` if one of the ``secrets`` contains a NUL byte.
    """
    for name, value in secrets.items():
        if "\0" in value.reveal():
            message = f"the value of `{name}` contains a NUL byte, which an environment variable cannot contain"
            raise InputError(message, hint="pass it as base64, and decode it in the task")
    names = {one.name for group in plan.groups for launch in group.launches for one in launch.credentials}
    found = [CredentialStore(directory.credentials).find(name) for name in sorted(names)]
    values = {credential_key(one.name, key): value for one in found if one is not None for key, value in one.payload.items()}
    return {
        **secrets,
        **values,
        **(_logins(plan, directory) if any(node.container not in ("none", "engine") for node in pool.node_settings) else {}),
    }


def _logins(plan: Plan, directory: StateDirectory) -> dict[str, Secret]:
    """Return the logins for the registries of a plan's images, from credentials of type REGISTRY."""
    registries = {registry_of(launch.image or "") for group in plan.groups for launch in group.launches} - {""}
    found = {registry: CredentialStore(directory.credentials).for_registry(registry) for registry in sorted(registries)}
    return {registry_key(registry): _login(payload) for registry, payload in found.items() if payload is not None}


def _login(payload: Mapping[str, Secret]) -> Secret:
    """Return ``user:password`` in Base64. A token without a user gets ``$oauthtoken``, the user name that NGC expects."""
    auth, user = payload["auth"].reveal(), payload["username"].reveal() if "username" in payload else ""
    if not user:
        with suppress(ValueError):
            if ":" in base64.b64decode(auth, validate=True).decode():
                return Secret(auth)  # it already contains user and password
    return Secret(base64.b64encode(f"{user or '$oauthtoken'}:{auth}".encode()).decode())


def _known(one: Credential) -> KnownCredential:
    return KnownCredential(keys=tuple(one.payload), unusable_reason=_UNUSABLE_REASONS[one.type])
