"""This user's DATA credentials in the form that object stores need."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from distflow.state.credentials import Credentials
from distflow.storage.credentials import Credentials as StoreCredentials
from distflow.storage.credentials import CredentialsFor

__all__ = ["kept_in"]

_STYLES: dict[str, Literal["virtual", "path", "auto"]] = {"virtual": "virtual", "path": "path", "auto": "auto"}


def kept_in(folder: Path) -> CredentialsFor:
    """Return a function that finds the credentials of a URL's profile in ``folder``; each call reads the folder again."""

    def find(profile: str) -> StoreCredentials | None:
        payload = Credentials(folder).for_data(profile)
        if payload is None:
            return None

        def text(key: str) -> str | None:
            return payload[key].reveal() if key in payload else None

        return StoreCredentials(
            access_key_id=text("access_key_id") or "",
            access_key=payload["access_key"],
            override_url=text("override_url"),
            region=text("region"),
            addressing_style=_STYLES.get(text("addressing_style") or ""),
        )

    return find
