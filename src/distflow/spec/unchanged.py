"""Records of files and directories that were stored as blobs, so that unchanged files are not read again.

A file counts as unchanged while its name, mode, size, times, device and inode are the same, as in git's index. A write could
leave them the same only if it happens within one tick of the file system's clock after the previous write. Files that changed
just before they were read are therefore not recorded. The record of a path is a small file among the blobs.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import stat
import tempfile
from collections.abc import Iterable
from pathlib import Path

from distflow.runtime.clock import now
from distflow.runtime.files.safe_files import publish
from distflow.runtime.untrusted import decode_object

__all__ = ["PathRecord"]

_FORMAT = 2
"""Increase it if distflow creates a different archive from the same files."""
_SETTLED_S = 2.0
"""Some file systems store times only in steps of two seconds."""


class PathRecord:
    """The record of one path of this machine."""

    def __init__(self, blobs: Path, path: str, entries: Iterable[tuple[str, os.stat_result]]) -> None:
        """Compute the state of a file or of a directory's ``entries`` before they are read.

        Each entry has its relative name (empty for a single file) and its status. ``path`` identifies the record: an absolute
        path, and for a directory also the patterns of excluded files.
        """
        self._blobs = blobs
        self._place = blobs / f"{hashlib.sha256(os.fsencode(path)).hexdigest()[:40]}.seen"
        began, newest = now(), 0.0
        hasher = hashlib.sha256(b"%d\n" % _FORMAT)
        for name, info in entries:
            known = [info.st_mode]
            if not stat.S_ISDIR(info.st_mode):  # ignore the times of directories, because excluded files change them, too
                known += [info.st_size, info.st_mtime_ns, info.st_ctime_ns, info.st_ino, info.st_dev]
                newest = max(newest, info.st_ctime)
            hasher.update(os.fsencode(name) + b"\0" + repr(known).encode())
        self._state = hasher.hexdigest()
        self._is_settled = newest < began - _SETTLED_S

    def find(self) -> tuple[str, int] | None:
        """Return the digest and the size of the blob.

        Return ``None`` if the files have changed, the blob is gone, or there is no valid record.
        """
        try:
            found = decode_object(self._place.read_bytes())
            digest, size = str(found["digest"]), int(found["size"])
            is_same = found["state"] == self._state and digest.isalnum()
            return (digest, size) if is_same and (self._blobs / digest).stat().st_size == size else None
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def remember(self, digest: str, size: int) -> None:
        """Record the blob of the files, unless they changed just before they were read. Errors of writing are ignored."""
        if not self._is_settled:
            return
        record = {"state": self._state, "digest": digest, "size": size}
        with (
            contextlib.suppress(OSError),
            tempfile.TemporaryDirectory(dir=self._blobs) as folder,
            open(os.path.join(folder, "record"), "xb") as part,
        ):
            part.write(json.dumps(record).encode())
            publish(part, str(self._place))
