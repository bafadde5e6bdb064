"""This user's credentials: named sets of secrets, each in one file of mode 0600, in a directory of mode 0700.

Callers find a credential by its name (``find``), by a URL profile such as ``s3://bucket`` (``for_data``) or by a registry
(``for_registry``). This module reveals values only to check them, to return and compare profiles, to write the file, and for
the fields of ``storage.credentials.Credentials`` that are not secret. It does not print, log or quote any value.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from types import MappingProxyType
from typing import Literal

from msgspec import Struct

from distflow.documents.text import listed, plain
from distflow.errors import InputError, NotFound, StateError
from distflow.shell import Secret
from distflow.state.directory import write_private
from distflow.storage.credentials import Credentials, CredentialsFor

__all__ = ["LONGEST_VALUE", "Credential", "CredentialStore", "CredentialType", "check_payload", "data_credentials"]


LONGEST_VALUE = 64 * 1024
"""Bytes. Linux accepts environment variables of up to twice this size."""

_NAME = re.compile(r"[a-zA-Z]([a-zA-Z0-9_-]*[a-zA-Z0-9])?")
_LONGEST_NAME = 64
_COMPONENT = r"[^/,;*\s]+"
_PROFILE = re.compile(rf"(?:s3|gs|az|azure)://{_COMPONENT}|(?:tos|swift)://{_COMPONENT}/{_COMPONENT}")
_PROFILES = "s3://BUCKET, gs://BUCKET, az://CONTAINER, azure://ACCOUNT, tos://ENDPOINT/BUCKET or swift://ENDPOINT/ACCOUNT"
_ADDRESSING = ("virtual", "path", "auto")


class CredentialType(str, Enum):
    """The purpose of a credential."""

    GENERIC = "GENERIC"
    """For tasks whose ``credentials`` name it, and for URLs of notifications."""
    REGISTRY = "REGISTRY"
    """For images of one registry."""
    DATA = "DATA"
    """For data at storage URLs of one URL profile, such as ``s3://bucket``."""


_REQUIRED: Mapping[CredentialType, tuple[str, ...]] = MappingProxyType(
    {
        CredentialType.GENERIC: (),
        CredentialType.REGISTRY: ("auth",),
        CredentialType.DATA: ("access_key_id", "access_key", "endpoint"),
    }
)
_OPTIONAL: Mapping[CredentialType, tuple[str, ...]] = MappingProxyType(
    {
        CredentialType.REGISTRY: ("registry", "username"),
        CredentialType.DATA: ("region", "override_url", "addressing_style"),
    }
)


class Credential(Struct, frozen=True, kw_only=True):
    """A named set of secrets."""

    name: str
    type: CredentialType
    payload: Mapping[str, Secret]

    @property
    def profile(self) -> str | None:
        """The key for lookups: the URL profile for DATA, the registry for REGISTRY (may be empty), ``None`` for GENERIC."""
        if self.type is CredentialType.DATA:
            return self.payload["endpoint"].reveal()
        if self.type is CredentialType.REGISTRY:
            return self.payload["registry"].reveal() if "registry" in self.payload else ""
        return None


def check_payload(kind: CredentialType, payload: Mapping[str, Secret]) -> dict[str, Secret]:
    """Return the payload in its stored form. Raises ``InputError`` if it is not valid; the error never quotes a value."""
    if not payload:
        raise InputError("the credential has no payload", hint="give it with --payload KEY=VALUE or --payload-file KEY=FILE")
    for key, value in payload.items():
        _check_entry(key, value.reveal())
    if kind is CredentialType.GENERIC:
        return dict(payload)
    known = (*_REQUIRED[kind], *_OPTIONAL[kind])
    unknown = [key for key in payload if key not in known]
    if unknown:
        raise InputError(f"`{unknown[0]}` is not a key of a {kind.value} credential", hint=f"keys: {', '.join(known)}")
    missing = [key for key in _REQUIRED[kind] if key not in payload]
    if missing:
        raise InputError(f"a {kind.value} credential needs {listed(missing)}", hint=f"keys: {', '.join(known)}")
    kept = dict(payload)
    if kind is CredentialType.REGISTRY:
        return kept
    endpoint = payload["endpoint"].reveal().rstrip("/")
    if not _PROFILE.fullmatch(endpoint):
        raise InputError("`endpoint` is not the beginning of a storage URL", hint=f"write {_PROFILES}, and nothing after it")
    kept["endpoint"] = Secret(endpoint)
    if "override_url" in payload and not re.match(r"https?://[^/\s]+", payload["override_url"].reveal()):
        raise InputError(
            "`override_url` is not a URL", hint="write the address of the service, beginning with http:// or https://"
        )
    if "addressing_style" in payload and payload["addressing_style"].reveal() not in _ADDRESSING:
        raise InputError("`addressing_style` is not valid", hint=f"use one of {', '.join(_ADDRESSING)}")
    return kept


def _check_entry(key: str, value: str) -> None:
    if not key or not value:
        problem = f"the value of `{key}` is empty" if key else "a key of the payload is empty"
        raise InputError(problem, hint="give every key a value, and every value a key")
    # A key may become the name of a file.
    if "/" in key or key in (".", "..") or not key.isprintable() or len(os.fsencode(key)) > 200:
        raise InputError(
            f"{key!r} is not a valid payload key",
            hint="it may become a file name: use letters, digits, `_` and `-`, and at most 200 characters",
        )
    if "\0" in value:
        raise InputError(f"the value of {key} contains a NUL byte", hint="store it as base64, and decode it in the task")
    if len(value.encode("utf-8", "surrogateescape")) > LONGEST_VALUE:
        raise InputError(
            f"the value of {key} is longer than {LONGEST_VALUE // 1024} KiB",
            hint="send larger data with `files` or `inputs` of the task",
        )


class CredentialStore:
    """The credentials in one folder, which may not exist yet.

    All methods raise ``StateError`` if the folder, or a credential that they read, cannot be used.
    """

    def __init__(self, folder: Path) -> None:
        """Use ``folder``."""
        self._folder = folder

    def all(self) -> tuple[Credential, ...]:
        """Return all credentials, ordered by name."""
        with _errors(self._folder):
            try:
                paths = sorted(self._folder.glob("*.json"))
            except FileNotFoundError:
                return ()
            return tuple(one for one in map(_read, paths) if one is not None)

    def find(self, name: str) -> Credential | None:
        """Return the credential with this name, or ``None``."""
        if not _NAME.fullmatch(name):
            return None
        with _errors(self._folder):
            return _read(self._folder / f"{name}.json")

    def for_data(self, profile: str) -> Mapping[str, Secret] | None:
        """Return the payload of the DATA credential for a URL profile such as ``s3://bucket``; ``None`` without one."""
        return self._payload(CredentialType.DATA, profile.rstrip("/"))

    def for_registry(self, registry: str) -> Mapping[str, Secret] | None:
        """Return the payload of a registry's REGISTRY credential; ``None`` without one.

        ``""`` stands for images without a registry in their name.
        """
        return self._payload(CredentialType.REGISTRY, registry)

    def _payload(self, kind: CredentialType, profile: str) -> Mapping[str, Secret] | None:
        return next((one.payload for one in self.all() if one.type is kind and one.profile == profile), None)

    def set(self, name: str, kind: CredentialType, payload: Mapping[str, Secret]) -> Credential:
        """Store a credential, and return it in its stored form.

        A DATA or REGISTRY credential replaces the existing credential of its type for the same URL profile or registry. Raises
        ``InputError`` if another credential has the name, or if the name or the payload is not valid.
        """
        if not _NAME.fullmatch(name) or len(name) > _LONGEST_NAME:
            hint = (
                f"use at most {_LONGEST_NAME} letters, digits, `_` and `-`; begin with a letter, and end with a letter or digit"
            )
            raise InputError(f"`{plain(name)}` is not a valid credential name", hint=hint)
        made = Credential(name=name, type=kind, payload=MappingProxyType(check_payload(kind, payload)))
        with _errors(self._folder), self._locked():
            existing = self.all()
            before = next((one for one in existing if one.profile is not None and _has_same_profile(one, made)), None)
            if any(one.name == name and one != before for one in existing):
                raise InputError(
                    f"the credential {name} already exists", hint=f"remove it first: distflow credential delete {name}"
                )
            self._write(made)
            if before is not None and before.name != name:
                (self._folder / f"{before.name}.json").unlink(missing_ok=True)
        return made

    def delete(self, name: str) -> None:
        """Remove a credential. Raises ``NotFound`` if there is none with this name."""
        if self.find(name) is None:
            known = ", ".join(one.name for one in self.all())
            raise NotFound(
                f"there is no credential `{name}`", hint=f"existing credentials: {known}" if known else "no credentials exist"
            )
        with _errors(self._folder), self._locked():
            (self._folder / f"{name}.json").unlink(missing_ok=True)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._folder.chmod(0o700)
        fd = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            yield
        finally:
            os.close(fd)

    def _write(self, one: Credential) -> None:
        text = json.dumps({"type": one.type.value, "payload": {key: value.reveal() for key, value in one.payload.items()}})
        write_private(self._folder / f"{one.name}.json", text.encode())


def _has_same_profile(one: Credential, other: Credential) -> bool:
    return (one.type, one.profile) == (other.type, other.profile)


def _read(path: Path) -> Credential | None:
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    try:
        found = json.loads(content)
        payload = {str(key): Secret(str(value)) for key, value in found["payload"].items()}
        made = Credential(name=path.stem, type=CredentialType(found["type"]), payload=MappingProxyType(payload))
        _ = made.profile
    except (ValueError, KeyError, TypeError, AttributeError):
        # The parser's message is not shown, because it may quote secret values.
        hint = f"remove {path}, and set the credential again"
        raise StateError(f"the credential {path.stem} cannot be read: its file is damaged", hint=hint) from None
    return made


@contextmanager
def _errors(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        hint = "free space there or make it readable and writable for you, or point DISTFLOW_STATE at another directory"
        raise StateError(f"cannot use the credentials: {error.filename or folder}: {error.strerror}", hint=hint) from error


_STYLES: dict[str, Literal["virtual", "path", "auto"]] = {"virtual": "virtual", "path": "path", "auto": "auto"}


def data_credentials(folder: Path) -> CredentialsFor:
    """Return a function that finds the credentials for a URL profile in ``folder``, which it reads each time."""

    def find(profile: str) -> Credentials | None:
        payload = CredentialStore(folder).for_data(profile)
        if payload is None:
            return None

        def text(key: str) -> str | None:
            return payload[key].reveal() if key in payload else None

        return Credentials(
            access_key_id=text("access_key_id") or "",
            access_key=payload["access_key"],
            override_url=text("override_url"),
            region=text("region"),
            addressing_style=_STYLES.get(text("addressing_style") or ""),
        )

    return find
