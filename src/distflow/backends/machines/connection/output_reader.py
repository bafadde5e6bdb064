"""Read the files of one attempt from its node: list them, and fetch chosen files into a local directory.

``OutputReader`` has its own connection to ``runtime.services.output_server``. The node is not trusted: no file is written
outside of the local directory, and no link that leads out of it is created.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import shutil
import stat
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Literal

from msgspec import Struct, field

from distflow.backends.machines.connection.bootstrap import open_service
from distflow.backends.machines.connection.stream import ServiceStream
from distflow.documents.quantities import bytes_text
from distflow.errors import AgentError, StorageError
from distflow.runtime.files.safe_files import path_inside
from distflow.runtime.services.frames import read_frame
from distflow.runtime.wire import OpError, encode
from distflow.transports.base import Transport

__all__ = ["FetchCounts", "OutputReader", "Place", "RemoteFile"]

Place = Literal["output", "work"]
"""``output``: the task's ``{{output}}``. ``work``: files of its working directory that have changed since the
attempt was prepared, without ``__pycache__``."""

_MAX_FILES = 500_000
_MAX_NAME = 4096
_MAX_TIME_NS = 2**32 * 10**9
_AHEAD_FILES, _AHEAD_BYTES = 64, 1 << 20
"""Limits of the number of files, and of their total bytes, that are requested before earlier files have arrived."""
_HASHED_AT_ONCE = 1 << 20


class RemoteFile(Struct, frozen=True, kw_only=True):
    """A file on a node."""

    name: str
    """Its path relative to the listed directory."""
    size: int
    modified_ns: int
    is_executable: bool
    link: str
    """For a symbolic link inside the directory: its relative target. Otherwise empty."""


class FetchCounts(Struct, kw_only=True):
    """The result of ``OutputReader.fetch``."""

    files: int = 0
    """Number of copied files and created links."""
    size: int = 0
    """Bytes of the copied files."""
    unchanged: int = 0
    """Number of files that existed already with the same size and modification time, and of links with the same target."""
    left_out: int = 0
    """Number of links that were not created, because they could lead out of the local directory."""
    problems: list[str] = field(default_factory=list)
    """Files that the node could not send, each with the reason."""
    finished: set[str] = field(default_factory=set)
    """Names of files and links that the next call skips: copied, unchanged, left out, or in ``problems``."""


class OutputReader:
    """The files of one attempt, as a context manager. Use it from one thread.

    ``files`` lists them. ``others`` is the number of entries that cannot be fetched, such as sockets.
    """

    def __init__(
        self, transport: Transport, root: str, python: str, attempt: str, *, place: Place = "output", timeout_s: float
    ) -> None:
        """Connect and list the files.

        Args:
            transport: The transport to the node.
            root: distflow's directory on the node.
            python: The node's Python.
            attempt: The name of the attempt.
            place: The directory of the attempt.
            timeout_s: The maximum time for the node's first answer, in seconds.

        Raises:
            AgentError: if the node refuses, with the kind ``not_found`` if the directory no longer exists.
            BootstrapFailed: if distflow's runtime does not start on the node.
            NodeUnreachable: if there is no connection.

        """
        self._node = transport.name
        self._source = f"{attempt}/{place}"
        opened = open_service(transport, root, python, "services.output_server", timeout_s=timeout_s)
        self._stream = ServiceStream(transport.name, opened, "the connection that fetched files ended")
        try:
            self._stream.write(encode({"attempt": attempt, "place": place}))
            self.files, self.others = self._read_list()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> OutputReader:
        """Return the reader."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the connection."""
        self.close()

    def close(self) -> None:
        """Close the connection. May be called twice."""
        self._stream.close()

    def fetch(
        self, files: Iterable[RemoteFile], folder: Path, on_progress: Callable[[str, int], None], counts: FetchCounts
    ) -> None:
        """Copy files below ``folder``, which exists, with their modification times.

        A file gets its name when it is complete. Until then, its data is in a hidden file next to it, and the next call
        continues there. Existing files with the same size and modification time are skipped, other files are replaced.

        Args:
            files: Some of ``self.files``.
            folder: The local directory.
            on_progress: Called with the name of a file and the number of its bytes that have arrived.
            counts: The counts to update. After a broken connection, pass the same object again.

        Raises:
            AgentError: if the node's messages are malformed, or if a received file is damaged.
            NodeUnreachable: if the connection breaks.
            StorageError: if a file cannot be written here, or its path leads through a link out of ``folder``.

        """
        files, known = [one for one in files if one.name not in counts.finished], set[str]()
        requested: deque[_LocalFile] = deque()
        left: deque[_LocalFile] = deque()
        try:
            for file in files:
                if not file.link:
                    local = _LocalFile(folder, file, self._source, known)
                    if local.is_unchanged():
                        counts.unchanged += 1
                        counts.finished.add(file.name)
                        on_progress(file.name, file.size)
                    else:
                        left.append(local)
            _check_room(folder, sum(one.missing_bytes() for one in left))
            while left or requested:
                while left and _may_request(left[0].file, requested):
                    local = left.popleft()
                    at, prefix = local.open()
                    requested.append(local)
                    self._stream.write(encode({"file": local.file.name, "at": at, "prefix": prefix}))
                if requested:
                    self._receive(requested[0], counts, on_progress)
                    counts.finished.add(requested[0].file.name)
                    requested.popleft().close()
            for file in files:
                if file.link:
                    _make_link(folder, file, counts, known)
                    counts.finished.add(file.name)
        except OSError as error:
            raise StorageError(f"cannot write `{error.filename or folder}`: {error.strerror or error}") from error
        except OpError as error:
            raise AgentError(self._node, error.kind, error.message) from error
        finally:
            for local in requested:
                local.close()

    def _receive(self, local: _LocalFile, counts: FetchCounts, on_progress: Callable[[str, int], None]) -> None:
        """Receive the answer to the oldest request."""
        name = local.file.name
        try:
            answer = self._stream.line()
        except AgentError as error:
            if error.kind == "malformed":
                raise
            counts.problems.append(f"{name}: {error.detail}")
            return
        at, size = int(answer["at"]), int(answer["size"])
        digest = local.resume(at)
        on_progress(name, at)
        while at < size:
            try:
                frame = read_frame(self._stream)
            except OpError as error:
                if error.kind in ("bad_request", "damaged"):  # the node broke the protocol
                    raise
                counts.problems.append(f"{name}: {error.message}")
                return
            if frame is None:
                raise self._stream.broken_error()
            at += len(frame)
            if at > size:
                raise OpError("damaged", f"it sent more bytes of `{name}` than it announced")
            digest.update(frame)
            local.write(frame)
            on_progress(name, at)
        if self._stream.line().get("hash") != digest.hexdigest():
            local.drop()
            raise OpError("damaged", f"`{name}` was damaged during the transfer (wrong checksum): run the command again")
        local.finish(int(answer["modified_ns"]))
        counts.files += 1
        counts.size += size

    def _read_list(self) -> tuple[tuple[RemoteFile, ...], int]:
        found: list[RemoteFile] = []
        while "entries" in (answer := self._stream.line()):
            for name, size, modified_ns, is_executable, link in answer["entries"]:
                if not 0 < len(name) <= _MAX_NAME or {"", ".", ".."} & set(name.split("/")) or "\0" in name:
                    raise AgentError(self._node, "malformed", f"the node sent an invalid file name: {name[:100]!r}")
                found.append(
                    RemoteFile(name=name, size=size, modified_ns=_bounded(modified_ns), is_executable=is_executable, link=link)
                )
            if len(found) > _MAX_FILES:
                hint = "let the task pack files into archives, or write them to a URL with `outputs`"
                message = f"the task's directory has more than {_MAX_FILES:,} files, the maximum that distflow can list"
                raise AgentError(self._node, "malformed", message, hint=hint)
        return tuple(found), int(answer.get("others", 0))


def _local_path(folder: Path, name: str, known: set[str]) -> str:
    """Return the path of a file below ``folder``. Raises ``StorageError`` if a local link leads out of ``folder``.

    ``known`` is the cache of ``path_inside``.
    """
    try:
        return path_inside(os.fspath(folder), name, known)
    except OpError:
        text = f"`{folder / name}` leads through a link out of `{folder}`, so nothing is written there"
        raise StorageError(text, hint="choose another directory with --to, or remove the link") from None


def _may_request(file: RemoteFile, requested: deque[_LocalFile]) -> bool:
    """Return whether a file may be requested before earlier files have arrived."""
    if not requested:
        return True
    return len(requested) < _AHEAD_FILES and sum(one.file.size for one in requested) + file.size <= _AHEAD_BYTES


def _check_room(folder: Path, size: int) -> None:
    free = shutil.disk_usage(folder).free
    if size > free:
        text = f"not enough space: {bytes_text(size)} needed, {bytes_text(free)} free"
        raise OSError(errno.ENOSPC, text, os.fspath(folder))


class _LocalFile:
    """A file that is being fetched."""

    def __init__(self, folder: Path, file: RemoteFile, source: str, known: set[str]) -> None:
        self.file = file
        self._path = _local_path(folder, file.name, known)
        # The next try uses the same name. A hash is never too long for a file name.
        name = hashlib.sha256(f"{source}/{file.name}".encode("utf-8", "surrogateescape")).hexdigest()[:16]
        self._part = os.path.join(os.path.dirname(self._path), f".distflow-{name}.part")
        self._fd = -1

    def is_unchanged(self) -> bool:
        """Return whether the file exists already with the same size and modification time."""
        try:
            info = os.lstat(self._path)
        except OSError:
            return False
        is_file = stat.S_ISREG(info.st_mode)
        return is_file and (info.st_size, info.st_mtime_ns) == (self.file.size, self.file.modified_ns)

    def missing_bytes(self) -> int:
        """Return the number of bytes that have not arrived yet."""
        try:
            return max(0, self.file.size - os.lstat(self._part).st_size)
        except OSError:
            return self.file.size

    def open(self) -> tuple[int, str]:
        """Open the incomplete file. Return the number of its bytes and their SHA-256."""
        os.makedirs(os.path.dirname(self._path), exist_ok=True)
        if os.path.isdir(self._path) and not os.path.islink(self._path):
            raise IsADirectoryError(
                errno.EISDIR,
                "it is a directory here, but a file on the node: rename it, or use another destination",
                self._path,
            )
        self._fd = os.open(self._part, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise OSError(errno.EBUSY, "another command is fetching this file, so wait for it", self._path) from error
        self._digest = hashlib.sha256()
        at = 0
        while data := os.read(self._fd, _HASHED_AT_ONCE):
            self._digest.update(data)
            at += len(data)
        return at, self._digest.hexdigest()

    def resume(self, at: int) -> Any:
        """Continue after ``at`` bytes, which are all bytes that have arrived, or 0 to start again. Return their hash object."""
        if at != os.fstat(self._fd).st_size:
            os.ftruncate(self._fd, 0)
            os.lseek(self._fd, 0, os.SEEK_SET)
            if at:
                message = f"the node did not continue `{self.file.name}` at the requested byte: run the command again"
                raise OpError("bad_request", message)
            self._digest = hashlib.sha256()
        return self._digest

    def write(self, data: bytes) -> None:
        """Append data."""
        view = memoryview(data)
        while view:
            view = view[os.write(self._fd, view) :]

    def finish(self, modified_ns: int) -> None:
        """Give the complete file its name."""
        if self.file.is_executable:
            mode = os.fstat(self._fd).st_mode
            os.fchmod(self._fd, (mode | (mode & 0o444) >> 2) & 0o777)
        os.utime(self._fd, ns=(_bounded(modified_ns),) * 2)
        os.rename(self._part, self._path)
        os.close(self._fd)
        self._fd = -1

    def drop(self) -> None:
        """Discard the data."""
        os.ftruncate(self._fd, 0)

    def close(self) -> None:
        """Close the incomplete file, and keep its data for the next try."""
        if self._fd < 0:
            return
        if not os.fstat(self._fd).st_size:
            with contextlib.suppress(OSError):
                os.unlink(self._part)
        os.close(self._fd)
        self._fd = -1


def _bounded(modified_ns: int) -> int:
    """Return a time within the range that usual file systems can store. The node is not trusted."""
    return min(max(modified_ns, 0), _MAX_TIME_NS)


def _make_link(folder: Path, file: RemoteFile, counts: FetchCounts, known: set[str]) -> None:
    """Create a link if it stays inside ``folder``. Its target may lead through other fetched links, which stay inside, too."""
    path = _local_path(folder, file.name, known)
    known.clear()  # paths through this link lead elsewhere
    *up, last = file.link.split("/")
    below = os.path.relpath(os.path.realpath(os.path.dirname(path)), os.path.realpath(folder))
    depth = 0 if below == "." else below.count("/") + 1
    while up and up[0] == "..":
        del up[0]
        depth -= 1
    if depth < 0 or {"", ".", ".."} & {*up, last} or "\0" in file.link:
        counts.left_out += 1
        return
    if os.path.islink(path) and os.readlink(path) == file.link:
        counts.unchanged += 1
        return
    os.makedirs(os.path.dirname(path), exist_ok=True)
    if os.path.lexists(path):
        os.unlink(path)
    os.symlink(file.link, path)
    counts.files += 1
