"""Files of SSH servers as a store, for ``sftp://``.

Connections use the OpenSSH configuration, keys and known hosts, like connections to nodes. An unknown host key is refused. If
``StrictHostKeyChecking`` is ``accept-new`` or ``no``, it is added to known_hosts instead.
"""

from __future__ import annotations

import contextlib
import posixpath
import re
import secrets
import stat
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distflow.documents.urls import StorageUrl
from distflow.errors import (
    AuthenticationRefused,
    DistflowError,
    HostKeyMismatch,
    HostKeyUnknown,
    InputError,
    NodeError,
    NodeUnreachable,
    StorageError,
    StorageMissing,
    StorageRefused,
    StorageUnreachable,
)
from distflow.storage.base import Entry, Sink
from distflow.storage.failures import driver_errors, local_errors
from distflow.storage.files import is_part, open_source, part_name
from distflow.transports.ssh import load_connection
from distflow.transports.ssh.config import SshDestination

if TYPE_CHECKING:
    from distflow.transports.ssh.connection import SshConnection

__all__ = ["SftpStore", "destination_of"]

_MOST_SESSIONS = 4
"""The maximum number of SFTP sessions on the connection. sshd allows ten for each connection by default (``MaxSessions``)."""
_PIECE_BYTES = 1 << 20
_TIMEOUT_S = 60.0
_ADDRESS = re.compile(r"(?:(?P<user>[^@]+)@)?(?:\[(?P<v6>[^\]]+)\]|(?P<host>[^:]+))(?::(?P<port>[0-9]{1,5}))?")


def destination_of(url: StorageUrl) -> SshDestination:
    """Return the SSH destination of a URL. Raises ``InputError``."""
    match = _ADDRESS.fullmatch(url.container)
    port = int(match["port"]) if match is not None and match["port"] else None
    # Other programs would take a name that begins with `-` as an option.
    if match is None or (match["host"] or "").startswith("-") or (port is not None and not 0 < port < 65536):
        raise InputError(f"{url} has no valid host and port", hint="write sftp://[user@]host[:port]/path")
    return SshDestination(host=match["v6"] or match["host"], port=port, user=match["user"])


class SftpStore:
    """One machine (contract: ``storage.base.DataStore``); keys are absolute paths without their first slash."""

    def __init__(self, url: StorageUrl) -> None:
        """Open no connection yet. Raises ``InputError`` for a URL without a valid host."""
        self._url = url
        self._destination = destination_of(url)
        self._lock = threading.Lock()
        self._connection: SshConnection | None = None
        self._idle: list[tuple[SshConnection, Any]] = []
        self._slots = threading.BoundedSemaphore(_MOST_SESSIONS)

    def find(self, key: str) -> Sequence[Entry]:
        """Return the file, or all files below the directory, without the incomplete files of transfers.

        A link at the key itself is followed. Below it, links to files are followed, and links to directories are left out.
        """
        with self._session(key) as client:
            try:
                found = client.stat(_path(key))
            except FileNotFoundError:
                return []
            if stat.S_ISDIR(found.st_mode):
                return list(_walk(client, key))
            return [_entry(key, found)] if stat.S_ISREG(found.st_mode) else []

    def find_removable(self, key: str) -> Sequence[Entry]:
        """Return the file or link, or all complete files and links below the directory. No link is followed."""
        with self._session(key) as client:
            try:
                found = client.lstat(_path(key))
            except FileNotFoundError:
                return []
            if stat.S_ISDIR(found.st_mode):
                return list(_walk(client, key, follow=False))
            return [_entry(key, found)] if stat.S_ISREG(found.st_mode) or stat.S_ISLNK(found.st_mode) else []

    def stat(self, key: str) -> Entry:
        """Return one file."""
        with self._session(key) as client:
            found = client.stat(_path(key))
            if not stat.S_ISREG(found.st_mode):
                raise StorageMissing(f"{self._url.shown(key)}: there is no such file")
            return _entry(key, found)

    def read(self, entry: Entry, start: int, sink: Sink) -> None:
        """Pass the content from byte ``start`` to ``sink``."""
        with self._session(entry.key) as client, client.open(_path(entry.key), "rb") as file:
            file.seek(start)
            _prefetch(file, entry.size)
            at = start
            while at < entry.size and (piece := file.read(min(_PIECE_BYTES, entry.size - at))):
                with _callback():
                    sink(piece)
                at += len(piece)

    def write(self, key: str, source: Path, on_bytes: Callable[[int], None]) -> None:
        """Upload a file, under another name until it is complete."""
        path = _path(key)
        part = posixpath.join(posixpath.dirname(path), part_name(secrets.token_hex(8)))
        with self._session(key) as client:
            _make_folders(client, posixpath.dirname(path))
            try:
                with local_errors(source):
                    file = open_source(source)
                with file as original, client.open(part, "wbx") as target:
                    target.set_pipelined(True)
                    while piece := original.read(_PIECE_BYTES):
                        target.write(piece)
                        with _callback():
                            on_bytes(len(piece))
                client.posix_rename(part, path)
            except BaseException:
                with contextlib.suppress(Exception):
                    client.remove(part)
                raise

    def delete(self, key: str, *, top: str = "") -> None:
        """Remove a file or a link, but no directory. Refuse a path below ``top`` in which a directory is a link.

        SFTP cannot open a directory and then remove a file in it. Between the check and the removal, another user of the server
        who may write there can therefore still replace a directory.
        """
        path = _path(key)
        with self._session(key) as client, contextlib.suppress(FileNotFoundError):
            folder = posixpath.dirname(key)
            while key.startswith(f"{top}/") and folder != top:
                if stat.S_ISLNK(client.lstat(_path(folder)).st_mode):
                    raise StorageError(
                        f"cannot remove {self._url.shown(key)}: a link has replaced the directory {self._url.shown(folder)}",
                        hint="find out who replaced it, then run the command again",
                    )
                folder = posixpath.dirname(folder)
            client.remove(path)

    def check_readable(self, key: str) -> None:
        """Check that the objects at the key can be listed."""
        self.find(key)

    def check_writable(self, key: str) -> None:
        """Create a file in the nearest existing directory, and remove it."""
        with self._session(key) as client:
            path = _path(key)
            while path != "/":
                try:
                    mode = client.stat(path).st_mode
                except FileNotFoundError:
                    path = posixpath.dirname(path)
                    continue
                if stat.S_ISDIR(mode):
                    break
                shown = self._url.shown(path.lstrip("/"))
                raise StorageError(f"{shown} is not a directory", hint="choose another URL, or remove that file")
            probe = posixpath.join(path, part_name(secrets.token_hex(8)))
            client.open(probe, "wx").close()
            client.remove(probe)

    def close(self) -> None:
        """Close the connection."""
        with self._lock:
            connection, self._connection = self._connection, None
            self._idle.clear()
        if connection is not None:
            connection.close()

    @contextlib.contextmanager
    def _session(self, key: str) -> Iterator[Any]:
        """Provide an SFTP session to the block. A session on a broken connection is not used again."""
        with self._slots:
            with self._errors(key):
                connection, client = self._client()
            try:
                with self._errors(key):
                    yield client
            except StorageUnreachable:
                with contextlib.suppress(Exception):
                    client.close()
                raise
            except BaseException:
                self._release(connection, client)
                raise
            self._release(connection, client)

    def _client(self) -> tuple[SshConnection, Any]:
        import paramiko  # noqa: PLC0415  its import takes 0.1 s

        with self._lock:
            if self._connection is None or not self._connection.is_active:
                self._idle.clear()
                if self._connection is not None:
                    self._connection.close()
                self._connection = load_connection()(self._url.container, self._destination)
                self._connection.connect()
            connection = self._connection
            if self._idle:
                return self._idle.pop()
        channel = connection.subsystem("sftp", _TIMEOUT_S)
        channel.settimeout(_TIMEOUT_S)
        return connection, paramiko.SFTPClient(channel)

    def _release(self, connection: SshConnection, client: Any) -> None:
        with self._lock:
            if connection is self._connection:
                self._idle.append((connection, client))

    @contextlib.contextmanager
    def _errors(self, key: str) -> Iterator[None]:
        where = self._url.shown(key)
        try:
            with driver_errors(where):
                yield
        except (HostKeyUnknown, HostKeyMismatch, AuthenticationRefused) as error:
            raise StorageRefused(f"{where}: {error.detail}", hint=error.hint) from None
        except NodeError as error:
            # Other errors than `NodeUnreachable` are mistakes in the SSH configuration: a retry does not help.
            kind = StorageUnreachable if isinstance(error, NodeUnreachable) else StorageError
            raise kind(f"{where}: {error.detail}", hint=error.hint) from None
        except _CallbackError as error:
            raise error.error from None


class _CallbackError(DistflowError):
    """Carries an exception of the caller's function past ``driver_errors``."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(str(error))
        self.error = error


@contextlib.contextmanager
def _callback() -> Iterator[None]:
    try:
        yield
    except Exception as error:  # noqa: BLE001  ``_errors`` raises it again unchanged
        raise _CallbackError(error) from None


def _prefetch(file: Any, size: int) -> None:
    """Request the rest of a file ahead, with at most 64 open requests: otherwise each piece would wait for the previous one."""
    prefetch = file._prefetch_thread  # noqa: SLF001  its thread would print exceptions

    def quiet_prefetch(*arguments: object) -> None:
        # The reading thread raises the same error.
        with contextlib.suppress(Exception):
            prefetch(*arguments)

    file._prefetch_thread = quiet_prefetch  # noqa: SLF001
    file.prefetch(size, 64)


def _path(key: str) -> str:
    return f"/{key}"


def _entry(key: str, found: Any) -> Entry:
    return Entry(key=key, size=found.st_size, tag=f"{found.st_mtime}-{found.st_size}", modified=float(found.st_mtime))


def _walk(client: Any, key: str, *, follow: bool = True) -> Iterator[Entry]:
    for item in sorted(client.listdir_attr(_path(key)), key=lambda one: str(one.filename)):
        below = f"{key}/{item.filename}" if key else str(item.filename)
        found = item
        if stat.S_ISLNK(item.st_mode) and follow:
            try:
                found = client.stat(_path(below))
            except FileNotFoundError:
                continue
        if stat.S_ISDIR(item.st_mode):
            yield from _walk(client, below, follow=follow)
        elif (stat.S_ISREG(found.st_mode) or stat.S_ISLNK(found.st_mode)) and not is_part(item.filename):
            yield _entry(below, found)


def _is_folder(client: Any, path: str) -> bool:
    try:
        return stat.S_ISDIR(client.stat(path).st_mode)
    except FileNotFoundError:
        return False


def _make_folders(client: Any, path: str) -> None:
    missing = []
    while path != "/" and not _is_folder(client, path):
        missing.append(path)
        path = posixpath.dirname(path)
    for one in reversed(missing):
        try:
            client.mkdir(one)
        except OSError as error:
            # Another transfer may have created it.
            if not _is_folder(client, one):
                raise StorageError(
                    f"the directory {one} cannot be created on the SSH server: {error}",
                    hint="check that no file has this name, and that your account may write to its parent directory",
                ) from None
