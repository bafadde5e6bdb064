"""The credentials of a task: names in the plan, values separate from it, and both combined for the node."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from distflow.plan.model import Launch, PlannedCredential
from distflow.plan.tokens import place_of
from distflow.shell import Secret
from distflow.spec.model import CredentialUse
from distflow.storage.credentials import Identity

__all__ = ["GivenSecrets", "given_secrets", "login_name", "planned_credentials", "registry_of", "stored_name"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenSecrets:
    """Everything secret that one task is given."""

    variables: Mapping[str, Secret] = field(default_factory=lambda: MappingProxyType({}))
    directories: Mapping[str, Mapping[str, Secret]] = field(default_factory=lambda: MappingProxyType({}))
    """Directory relative to the attempt's → file name → content."""
    login: tuple[str, Secret] | None = None
    """The registry of its image, and who we are to it, as docker's and podman's own files put that (base64)."""
    token: Secret | None = None
    """By which the tasks of its gang know one another."""
    stores: Mapping[int, Identity] = field(default_factory=lambda: MappingProxyType({}))
    """Who we are to the stores of what its node fetches, by ``Bring.number``; one that is not here must be relayed."""


def stored_name(credential: str, key: str) -> str:
    """Return the name under which a value of a credential is stored for a workflow; no variable can have it."""
    return f"{credential}:{key}"


def login_name(registry: str) -> str:
    """Return the name under which a registry's login is stored for a workflow; no credential can have it."""
    return f"@registry:{registry}"


def registry_of(image: str) -> str:
    """Return the registry that an image names; empty when it names none.

    >>> registry_of("registry.example:5000/team/train:3"), registry_of("team/train:3")
    ('registry.example:5000', '')
    """
    first, slash, _ = image.partition("/")
    return first if slash and ("." in first or ":" in first or first == "localhost") else ""


def planned_credentials(uses: Sequence[CredentialUse]) -> tuple[PlannedCredential, ...]:
    """Return the plan's part of a task's credentials."""
    return tuple(
        PlannedCredential(
            name=use.name,
            variables={name: key.value for name, key in use.variables.items()},
            path=place_of(use.directory.value) if use.directory else "",
            shown=use.directory.value if use.directory else "",
        )
        for use in uses
    )


def given_secrets(launch: Launch, stored: Mapping[str, Secret]) -> GivenSecrets:
    """Return what a task is given of the values ``stored`` for its workflow; ``--set-env`` wins over credentials.

    Raises ``LookupError``, which names what is missing.
    """
    variables = {
        name: _value(stored, stored_name(one.name, key), f"the key {key} of the credential {one.name}")
        for one in launch.credentials
        for name, key in one.variables.items()
    }
    variables |= {name: _value(stored, name, f"{name} of --set-env") for name in launch.secret_names}
    directories = {one.path: _of(stored, one.name) for one in launch.credentials if one.path}
    registry = registry_of(launch.image or "")
    login = stored.get(login_name(registry)) if registry else None
    return GivenSecrets(variables=variables, directories=directories, login=(registry, login) if login else None)


def _of(stored: Mapping[str, Secret], credential: str) -> dict[str, Secret]:
    prefix = stored_name(credential, "")
    found = {name.removeprefix(prefix): _as_file(value) for name, value in stored.items() if name.startswith(prefix)}
    if not found:
        raise LookupError(f"the credential {credential}")
    return found


def _as_file(value: Secret) -> Secret:
    """Return what the file holds: several lines are ended like lines, for programs that insist on it (keys of SSH)."""
    text = value.reveal()
    return Secret(f"{text}\n") if "\n" in text and not text.endswith("\n") else value


def _value(stored: Mapping[str, Secret], name: str, words: str) -> Secret:
    if name not in stored:
        raise LookupError(words)
    return stored[name]
