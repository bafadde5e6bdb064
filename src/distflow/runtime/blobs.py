"""Files that were sent once and are used by many attempts: ``<root>/blobs/<sha256>``."""

from __future__ import annotations

import base64
import binascii
import fcntl
import hashlib
import os
import re
import shutil
from typing import Any, Dict, NamedTuple

from distflow.runtime.wire import Json, OpError

__all__ = ["BLOBS", "CHUNK", "Uploads"]

BLOBS = "blobs"
CHUNK = 256 * 1024
_PART = ".part"


class _Upload(NamedTuple):
    fd: int
    path: str
    size: int
    digest: Any


class Uploads:
    """The uploads of one connection. What breaks off with it is removed by the next one that looks."""

    def __init__(self, root: str) -> None:
        self._directory = os.path.join(root, BLOBS)
        self._open: Dict[str, _Upload] = {}

    def stage(self, request: Json) -> Json:
        """Say whether the blob is here; when not, expect its chunks from the first byte."""
        name = self._name(request)
        size = int(request["size"])
        os.makedirs(self._directory, exist_ok=True)
        if os.path.exists(os.path.join(self._directory, name)):
            os.utime(os.path.join(self._directory, name))  # in use: cleaning goes by age
            return {"have": True}
        self._forget(name)
        self._sweep()
        if shutil.disk_usage(self._directory).free < size:
            raise OpError("no_space", "{} bytes are needed in {}".format(size, self._directory))
        path = os.path.join(self._directory, "{}.{}{}".format(name, os.getpid(), _PART))
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self._open[name] = _Upload(fd, path, size, hashlib.sha256())
        return {"have": False}

    def chunk(self, request: Json) -> Json:
        """Append one chunk; the last one is followed by the check of size and hash."""
        name = self._name(request)
        upload = self._open.get(name)
        if upload is None:
            raise OpError("bad_request", "`stage` comes before `chunk`")
        try:
            data = base64.b64decode(request["data"], validate=True)
        except (binascii.Error, TypeError) as error:
            raise OpError("bad_request", "the chunk is not base64") from error
        if len(data) > CHUNK:
            raise OpError("bad_request", "a chunk has at most {} bytes".format(CHUNK))
        try:
            view = memoryview(data)
            while view:
                view = view[os.write(upload.fd, view) :]
        except OSError as error:
            self._forget(name)
            raise OpError.from_os(error, "the blob cannot be written") from error
        upload.digest.update(data)
        if request.get("last"):
            self._finish(name, upload)
        return {}

    def _finish(self, name: str, upload: _Upload) -> None:
        size = os.fstat(upload.fd).st_size
        if size != upload.size or upload.digest.hexdigest() != name:
            self._forget(name)
            raise OpError("bad_request", "the blob arrived damaged: {} of {} bytes, hash differs".format(size, upload.size))
        os.rename(upload.path, os.path.join(self._directory, name))
        del self._open[name]
        os.close(upload.fd)

    def _forget(self, name: str) -> None:
        upload = self._open.pop(name, None)
        if upload is not None:
            os.unlink(upload.path)
            os.close(upload.fd)

    def _sweep(self) -> None:
        """Remove what agents left that died while they received."""
        for entry in os.listdir(self._directory):
            path = os.path.join(self._directory, entry)
            if entry.endswith(_PART) and not any(upload.path == path for upload in self._open.values()):
                try:
                    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
                except OSError:
                    continue
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    os.unlink(path)
                except OSError:
                    pass  # another agent is receiving it now
                finally:
                    os.close(fd)

    @staticmethod
    def _name(request: Json) -> str:
        name = request.get("hash")
        if not isinstance(name, str) or not re.fullmatch(r"[0-9a-f]{64}", name):
            raise OpError("bad_request", "`hash` is a SHA-256 in hexadecimal")
        return name
