"""This user's preferences on this machine: the pool that is used if none is named."""

from __future__ import annotations

import json
import os
import tempfile
from contextlib import suppress
from pathlib import Path

from distflow.errors import StateError
from distflow.state.directory import state_errors

__all__ = ["read_pool", "write_pool"]


def read_pool(file: Path) -> str | None:
    """Return the preferred pool; ``None`` if there is no preference. Raises ``StateError``."""
    try:
        with state_errors(file):
            found = json.loads(file.read_text()).get("pool")
    except StateError as error:
        if isinstance(error.__cause__, FileNotFoundError | NotADirectoryError):
            return None
        raise
    except (ValueError, AttributeError):
        raise StateError(f"the profile cannot be read: {file} is damaged", hint="remove it") from None
    return str(found) if found else None


def write_pool(file: Path, pool: str | None) -> None:
    """Store the preferred pool, or that there is none. Raises ``StateError``."""
    with state_errors(file):
        handle, new = tempfile.mkstemp(dir=file.parent, prefix=".profile-")
        try:
            with os.fdopen(handle, "w") as written:
                json.dump({"pool": pool}, written)
            os.replace(new, file)
        except BaseException:
            with suppress(OSError):
                os.unlink(new)
            raise
