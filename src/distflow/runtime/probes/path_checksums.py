"""Checksums of paths, to compare data that is stored on the nodes themselves."""

from __future__ import annotations

import hashlib
import os
import time
from typing import Dict, List

from distflow.runtime.wire import Json

__all__ = ["look"]

_LONGEST_S = 30.0
_MOST_FILES = 1000000


def look(paths: List[str]) -> Dict[str, Json]:
    """Return for each path ``error`` (null if it can be read), ``files``, ``bytes``, ``digest`` and ``is_complete``.

    The digest covers the names below the path and the sizes, but not the contents, which may be large. The search ends after
    half a minute or a million files. Then the numbers cover only a part, and there is no digest.
    """
    return {path: _checksum(os.path.expanduser(path), time.monotonic() + _LONGEST_S) for path in paths}


def _checksum(path: str, until: float) -> Json:
    entries: List[str] = []
    total = 0
    is_complete = True
    try:
        if not os.path.isdir(path):
            with open(path, "rb"):
                total = os.stat(path).st_size
            entries.append("/{}".format(total))
        else:
            for folder, folders, files in os.walk(path, onerror=_raise):
                folders.sort()
                for name in files:
                    full = os.path.join(folder, name)
                    size = os.stat(full).st_size
                    total += size
                    entries.append("{}/{}".format(os.path.relpath(full, path), size))
                if time.monotonic() > until or len(entries) > _MOST_FILES:
                    is_complete = False
                    break
    except OSError as error:
        return {"error": "{}: {}".format(error.filename or path, error.strerror)}
    digest = hashlib.sha256("\n".join(sorted(entries)).encode("utf-8", "surrogateescape")).hexdigest() if is_complete else None
    return {"error": None, "files": len(entries), "bytes": total, "digest": digest, "is_complete": is_complete}


def _raise(error: OSError) -> None:
    raise error
