"""The output server: lists the files of one attempt and sends them one by one. The attempt may have ended or still run.

Standard input: a line ``{"attempt", "place"}``, then a line ``{"file", "at", "prefix"}`` for each file. ``place`` is ``output``
(the task's ``{{output}}``) or ``work`` (the files that were written to its working directory after ``prepare``, without
``__pycache__``). ``at`` is the number of bytes that the submitter already has, and ``prefix`` their SHA-256.

Standard output: lines ``{"entries": [[name, size, modified_ns, is_executable, link], …]}``, and a line ``{"others": n}`` with
the number of entries that cannot be sent, such as sockets. Then, for each file, ``{"at", "size", "modified_ns"}``, frames with
the remaining bytes, and ``{"hash"}`` with the SHA-256 of the whole file. If a file cannot be read,
``{"error": {"kind", "message"}}`` or an error frame replaces its remaining bytes, and the next file can be requested. See
docs/agent-protocol.md.
"""

from __future__ import annotations

import errno
import hashlib
import os
import stat
import sys

from distflow.protocol.light_typing import Any, BinaryIO, Iterator, List, Optional, Tuple
from distflow.runtime import processes
from distflow.runtime.files import attempt_files, attempts, blobs
from distflow.runtime.files.packing import link_target, output_of, walk
from distflow.runtime.files.safe_files import path_inside
from distflow.runtime.services.frames import Gone, Peer, error_frame, frames
from distflow.runtime.untrusted import decode_object
from distflow.runtime.wire import Json, OpError

__all__ = ["serve"]

_MAX_LINE = 64 << 10
_BATCH = 500
"""Maximum number of entries in one line."""
_HASHED_AT_ONCE = 1 << 20
_CACHE = "__pycache__"


def serve(root: str, _umask: int) -> None:
    """Answer requests until the connection ends."""
    processes.rename_self("df-outputs")
    try:
        _serve(root, Peer())
    except Gone:
        sys.exit(1)


def _serve(root: str, peer: Peer) -> None:
    try:
        request = _line(peer)
        top, since = _top_of(root, request)
        _list(peer, top, since)
    except OpError as error:
        return peer.send({"error": error.as_json()})
    except OSError as error:
        return peer.send({"error": OpError.from_os(error, "cannot list the task's files").as_json()})
    except (KeyError, TypeError, ValueError) as error:
        return peer.send({"error": OpError("bad_request", "the request is malformed: {!r}".format(error)).as_json()})
    while True:
        wanted: Json = {}
        try:
            wanted = _line(peer)
            source, at, digest = _open(top, wanted)
        except OpError as error:
            peer.send({"error": error.as_json()})
            continue
        except OSError as error:
            peer.send({"error": OpError.from_os(error, "cannot read `{}`".format(wanted.get("file"))).as_json()})
            continue
        except (KeyError, TypeError, ValueError) as error:
            return peer.send({"error": OpError("bad_request", "the request is malformed: {!r}".format(error)).as_json()})
        with source:
            _send(peer, source, at, digest)


def _top_of(root: str, request: Json) -> Tuple[str, Optional[float]]:
    """Return the directory to list, and the time after which its files must have been written; None for no limit."""
    directory = attempts.directory_of(root, request["attempt"])
    if request.get("place", "output") == "output":
        return output_of(directory), None
    if request["place"] != "work":
        raise OpError("bad_request", "`place` is {!r}, but must be `output` or `work`".format(request["place"]))
    work = os.path.join(directory, "work")
    if not os.path.isdir(work) or os.path.islink(work):
        raise OpError("not_found", "`{}` no longer exists, or the task replaced it".format(work))
    try:
        # This file was written after the task's files and before the command started. Its modification time comes from the same
        # clock.
        return work, os.stat(os.path.join(directory, attempt_files.LAUNCH)).st_mtime
    except FileNotFoundError:
        return work, float("inf")  # the attempt has not been prepared


def _list(peer: Peer, top: str, since: Optional[float]) -> None:
    others = 0
    batch: List[List[Any]] = []
    for name, info in _files(top, since):
        entry = _entry(top, name, info)
        if entry is None:
            others += 1
            continue
        batch.append(entry)
        if len(batch) == _BATCH:
            peer.send({"entries": batch})
            batch = []
    peer.send({"entries": batch})
    peer.send({"others": others})


def _files(top: str, since: Optional[float]) -> Iterator[Tuple[str, os.stat_result]]:
    for name, info in walk(top, ""):
        if stat.S_ISDIR(info.st_mode):
            continue
        if since is None or (info.st_mtime > since and not _is_excluded(os.path.join(top, name), name)):
            yield name, info


def _is_excluded(path: str, name: str) -> bool:
    """Return whether a file is not the command's own: an unchanged blob that distflow placed, or a file of ``__pycache__``."""
    return _CACHE in name.split("/") or (os.path.exists(path) and blobs.is_complete(path))


def _entry(top: str, name: str, info: os.stat_result) -> Optional[List[Any]]:
    """Return the entry of a file or link; ``None`` for other kinds, and for a link out of ``top`` that leads to no file."""
    link = ""
    if stat.S_ISLNK(info.st_mode):
        try:
            target, is_inside = link_target(top, name)
            if is_inside:
                link = os.path.relpath(target, os.path.realpath(os.path.dirname(os.path.join(top, name))))
            else:
                info = os.stat(target)  # like the packed output, send the content of a file outside
        except (OpError, OSError):
            return None
    if not link and not stat.S_ISREG(info.st_mode):
        return None
    return [name, info.st_size, info.st_mtime_ns, bool(info.st_mode & 0o100), link]


def _open(top: str, wanted: Json) -> Tuple[BinaryIO, int, Any]:
    """Open a file, and skip the bytes that the submitter has. Returns the file, and the number and digest of these bytes.

    If the submitter's bytes differ from the file's, none are skipped.
    """
    name, at, prefix = str(wanted["file"]), int(wanted["at"]), str(wanted["prefix"])
    fd = os.open(path_inside(top, name), os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    source = os.fdopen(fd, "rb")
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file")
        digest = hashlib.sha256()
        left = at
        while left > 0:
            data = source.read(min(left, _HASHED_AT_ONCE))
            if not data:
                break
            digest.update(data)
            left -= len(data)
        if left or (at and digest.hexdigest() != prefix):  # the file has changed since the transfer was interrupted
            source.seek(0)
            return source, 0, hashlib.sha256()
        return source, at, digest
    except BaseException:
        source.close()
        raise


def _send(peer: Peer, source: BinaryIO, at: int, digest: Any) -> None:
    info = os.fstat(source.fileno())
    peer.send({"at": at, "size": info.st_size, "modified_ns": info.st_mtime_ns})
    try:
        rest = _Limited(source, info.st_size - at, digest)
        for _, frame in frames(rest):  # type: ignore[arg-type]
            peer.write(frame)
        if rest.left:
            raise OSError(errno.EIO, "it became shorter while it was sent; try again when the task no longer writes to it")
    except OSError as error:
        peer.write(error_frame(OpError.from_os(error, "cannot read the file")))
        return
    peer.send({"hash": digest.hexdigest()})


class _Limited:
    """Reads and hashes the next ``left`` bytes of a file that may grow."""

    def __init__(self, source: BinaryIO, left: int, digest: Any) -> None:
        self._source = source
        self._digest = digest
        self.left = left

    def read(self, size: int) -> bytes:
        """Return up to ``size`` bytes."""
        data = self._source.read(min(size, self.left))
        self._digest.update(data)
        self.left -= len(data)
        return data


def _line(peer: Peer) -> Json:
    line = peer.line(_MAX_LINE)
    if not line:
        raise Gone
    message: Json = decode_object(line)
    return message
