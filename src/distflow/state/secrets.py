"""Values of ``--set-env`` and of credentials: one file of mode 0600 per workflow, apart from the store, gone at its end."""

from __future__ import annotations

import hashlib
import hmac
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from distflow.shell import Secret
from distflow.state.store import Store

__all__ = ["gang_token", "is_own_record", "read_secrets", "record_mac", "remove_secrets", "sweep_secrets", "write_secrets"]

_BEING_SUBMITTED_S = 3600.0
_KEY = "gang.key"
_RECORD = b"record\0"
"""Nodes know the tokens of their gangs; none of these can be the signature of a record, which begins otherwise."""


def write_secrets(folder: Path, workflow: str, secrets: Mapping[str, Secret]) -> None:
    """Keep the secrets of a workflow (uuid); nothing is written when there are none."""
    if not secrets:
        return
    text = json.dumps({name: secret.reveal() for name, secret in secrets.items()})
    handle = os.open(folder / f"{workflow}.json", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(handle, "w") as file:
        file.write(text)


def read_secrets(folder: Path, workflow: str) -> dict[str, Secret]:
    """Return the secrets of a workflow (uuid), empty when it was given none."""
    try:
        text = (folder / f"{workflow}.json").read_text()
    except FileNotFoundError:
        return {}
    return {name: Secret(value) for name, value in json.loads(text).items()}


def remove_secrets(folder: Path, workflow: str) -> None:
    """Forget the secrets of a workflow (uuid); harmless when there are none."""
    (folder / f"{workflow}.json").unlink(missing_ok=True)


def gang_token(folder: Path, gang: str) -> Secret:
    """Return the token of one attempt of a gang: the same each time it is asked for, and of no use for any other gang.

    It is made from a key that lies in ``folder`` and is made when there is none (HMAC, RFC 2104).
    """
    return Secret(hmac.new(_key(folder), gang.encode(), hashlib.sha256).hexdigest())


def record_mac(folder: Path, record: str) -> str:
    """Return the signature of a record that nodes keep: an HMAC with the key in ``folder``, as hexadecimal digits."""
    return hmac.new(_key(folder), _RECORD + record.encode(), hashlib.sha256).hexdigest()


def is_own_record(folder: Path, record: str, mac: str) -> bool:
    """Return whether ``record_mac`` made the signature with the key in ``folder``; false without a key."""
    return (folder / _KEY).exists() and hmac.compare_digest(record_mac(folder, record), mac)


def _key(folder: Path) -> bytes:
    path = folder / _KEY
    try:
        key = path.read_bytes()
    except FileNotFoundError:
        key = os.urandom(32)
        with suppress(FileExistsError):
            made = folder / f"{_KEY}.{os.getpid()}"
            handle = os.open(made, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            with os.fdopen(handle, "wb") as file:
                file.write(key)
            try:
                os.link(made, path)
            finally:
                made.unlink()
        key = path.read_bytes()
    return key


def sweep_secrets(folder: Path, store: Store, now: float) -> None:
    """Forget the secrets of workflows that have ended, or were never stored: of a submit or a supervisor that was killed."""
    # In this order: what is submitted meanwhile is not among them.
    files = list(folder.glob("*.json"))
    unfinished, known = store.uuids(are_unfinished=True), store.uuids()
    for file in files:
        with suppress(OSError):
            is_over = file.stem in known or file.stat().st_mtime < now - _BEING_SUBMITTED_S
            if file.stem not in unfinished and is_over:
                file.unlink()
