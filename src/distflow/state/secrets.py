"""Values of ``--set-env`` and of credentials, and the key of tokens and signatures, in files of mode 0600 outside the store.

Each workflow with such values has one file, which is removed when the workflow ends.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from distflow.errors import StateError
from distflow.shell import Secret
from distflow.state.directory import write_private
from distflow.state.store import Store

__all__ = ["gang_token", "is_own_record", "read_secrets", "record_mac", "remove_secrets", "sweep_secrets", "write_secrets"]

_BEING_SUBMITTED_S = 3600.0
"""Secrets of a workflow that is not stored after this number of seconds are removed."""
_KEY = "gang.key"
_KEY_BYTES = 32
_RECORD = b"record\0"
"""The prefix of signed records. It keeps a node from using its gang's token, which has the same key, as a signature."""


def write_secrets(folder: Path, workflow: str, secrets: Mapping[str, Secret]) -> None:
    """Store the secrets of a workflow (uuid); without secrets, nothing is written."""
    if not secrets:
        return
    text = json.dumps({name: secret.reveal() for name, secret in secrets.items()})
    write_private(folder / f"{workflow}.json", text.encode())


def read_secrets(folder: Path, workflow: str) -> dict[str, Secret]:
    """Return the secrets of a workflow (uuid); empty if it has none."""
    try:
        text = (folder / f"{workflow}.json").read_text()
    except FileNotFoundError:
        return {}
    return {name: Secret(value) for name, value in json.loads(text).items()}


def remove_secrets(folder: Path, workflow: str) -> None:
    """Remove the secrets of a workflow (uuid), if there are any."""
    (folder / f"{workflow}.json").unlink(missing_ok=True)


def gang_token(folder: Path, gang: str) -> Secret:
    """Return the token of an attempt of a gang (``<workflow uuid>/<group>/<attempt>``): the same at every call.

    The token is an HMAC (RFC 2104) of the gang, so it is not valid for any other gang or attempt. Its key is in ``folder``, and
    is created if it does not exist.
    """
    return Secret(hmac.new(_key(folder), gang.encode(), hashlib.sha256).hexdigest())


def record_mac(folder: Path, record: str) -> str:
    """Return the signature of a record that nodes keep: an HMAC with the key in ``folder``, as hexadecimal digits."""
    return hmac.new(_key(folder), _RECORD + record.encode(), hashlib.sha256).hexdigest()


def is_own_record(folder: Path, record: str, mac: str) -> bool:
    """Return whether ``record_mac`` made the signature with the key in ``folder``; False without a key."""
    return (folder / _KEY).exists() and hmac.compare_digest(record_mac(folder, record), mac)


def _key(folder: Path) -> bytes:
    path = folder / _KEY
    if not path.exists():
        made = folder / f"{_KEY}.{os.getpid()}"
        write_private(made, os.urandom(_KEY_BYTES))
        try:
            with suppress(FileExistsError):  # another process was quicker
                os.link(made, path)
        finally:
            made.unlink()
    key = path.read_bytes()
    if len(key) != _KEY_BYTES:
        raise StateError(
            f"{path} is damaged: it has {len(key)} bytes instead of {_KEY_BYTES}",
            hint="remove the file while no workflow runs; the next workflow creates a new key",
        )
    return key


def sweep_secrets(folder: Path, store: Store, now: float) -> None:
    """Remove secrets that a killed submit or supervisor left behind.

    These are the secrets of ended workflows, and files older than one hour: secrets of workflows that were never stored, and
    temporary files of ``write_private`` and of a new key.
    """
    # List the files first, so that they do not include files of workflows that are submitted in the meantime.
    files = [*folder.glob("*.json"), *folder.glob(".new-*"), *folder.glob(f"{_KEY}.*")]
    unfinished, known = store.uuids(are_unfinished=True), store.uuids()
    for file in files:
        with suppress(OSError):
            is_over = file.stem in known or file.stat().st_mtime < now - _BEING_SUBMITTED_S
            if file.stem not in unfinished and is_over:
                file.unlink()
