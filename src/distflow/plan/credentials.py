"""The credentials of a task. The plan has the names of their variables and keys; ``task_secrets`` returns the values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from msgspec import Struct, field

from distflow.plan.model import Launch, PlannedCredential
from distflow.plan.tokens import place_of
from distflow.shell import Secret
from distflow.spec.model import CredentialUse
from distflow.storage.credentials import Identity

__all__ = ["TaskSecrets", "credential_key", "planned_credentials", "registry_key", "registry_of", "task_secrets"]


class TaskSecrets(Struct, frozen=True, kw_only=True):
    """All secrets of one task."""

    variables: Mapping[str, Secret] = field(default_factory=lambda: MappingProxyType({}))
    directories: Mapping[str, Mapping[str, Secret]] = field(default_factory=lambda: MappingProxyType({}))
    """The content of each file, by directory (relative to that of the attempt) and file name."""
    login: tuple[str, Secret] | None = None
    """The registry of its image, and the login in the format of docker's and podman's files (base64)."""
    token: Secret | None = None
    """The token by which the tasks of its gang authenticate each other."""
    stores: Mapping[int, Identity] = field(default_factory=lambda: MappingProxyType({}))
    """The store's credentials for each input that the node downloads, by ``Download.number``.

    Inputs without an entry are sent through the supervisor's machine."""


def credential_key(credential: str, key: str) -> str:
    """Return the name under which a workflow's secrets contain a value of a credential. No variable can have this name."""
    return f"{credential}:{key}"


def registry_key(registry: str) -> str:
    """Return the name under which a workflow's secrets contain a registry's login. No credential can have this name."""
    return f"@registry:{registry}"


def registry_of(image: str) -> str:
    """Return the registry in the name of an image; empty if there is none.

    >>> registry_of("registry.example:5000/team/train:3"), registry_of("team/train:3")
    ('registry.example:5000', '')
    """
    first, slash, _ = image.partition("/")
    return first if slash and ("." in first or ":" in first or first == "localhost") else ""


def planned_credentials(uses: Sequence[CredentialUse]) -> tuple[PlannedCredential, ...]:
    """Return the credentials of a task as the plan has them, without their values."""
    return tuple(
        PlannedCredential(
            name=use.name,
            variables={name: key.value for name, key in use.variables.items()},
            path=place_of(use.directory.value) if use.directory else "",
            shown=use.directory.value if use.directory else "",
        )
        for use in uses
    )


def task_secrets(launch: Launch, stored: Mapping[str, Secret]) -> TaskSecrets:
    """Return the secrets of a task from the values ``stored`` for its workflow. ``--set-env`` overrides credentials.

    The result has no ``token`` and no ``stores``: the caller adds them. Raises ``LookupError`` with a description of a missing
    value.
    """
    variables = {
        name: _value(stored, credential_key(one.name, key), f"the key `{key}` of the credential `{one.name}`")
        for one in launch.credentials
        for name, key in one.variables.items()
    }
    variables |= {name: _value(stored, name, f"the value of `--set-env {name}`") for name in launch.secret_names}
    directories = {one.path: _files(stored, one.name) for one in launch.credentials if one.path}
    registry = registry_of(launch.image or "")
    login = stored.get(registry_key(registry)) if registry else None
    return TaskSecrets(variables=variables, directories=directories, login=(registry, login) if login else None)


def _files(stored: Mapping[str, Secret], credential: str) -> dict[str, Secret]:
    prefix = credential_key(credential, "")
    found = {name.removeprefix(prefix): _as_file(value) for name, value in stored.items() if name.startswith(prefix)}
    if not found:
        raise LookupError(f"the files of the credential `{credential}`")
    return found


def _as_file(value: Secret) -> Secret:
    """Return the content of a file. A text of several lines ends with a line feed, which SSH requires for keys."""
    text = value.reveal()
    return Secret(f"{text}\n") if "\n" in text and not text.endswith("\n") else value


def _value(stored: Mapping[str, Secret], name: str, description: str) -> Secret:
    if name not in stored:
        raise LookupError(description)
    return stored[name]
