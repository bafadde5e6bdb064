"""The state directory, with this user's workflows, logs, credentials and preferences.

By default, each user has a separate one on each host: homes on NFS are common, and SQLite's WAL and file locks are not safe
between hosts.
"""

from __future__ import annotations

import fcntl
import json
import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from msgspec import Struct

from distflow.errors import StateError
from distflow.pools.ownership import owned_by_stranger, user_name
from distflow.runtime.files.safe_files import publish

__all__ = [
    "StateDirectory",
    "find_state_directory",
    "has_room",
    "is_locked",
    "read_profile",
    "state_errors",
    "try_lock",
    "write_private",
    "write_profile",
]


_LOCK_PAUSES_S = (0.01, 0.03, 0.1, 0.2)
_ROOM = 1 << 20
"""The minimum free space for writing, in bytes. One write of the supervisor needs less."""


class StateDirectory(Struct, frozen=True):
    """The paths of the files and directories in the state directory."""

    path: Path

    @property
    def store(self) -> Path:
        """The SQLite file."""
        return self.path / "distflow.sqlite3"

    @property
    def blobs(self) -> Path:
        """Files that specs send, and archives of inputs, outputs and checkpoints, named by their SHA-256."""
        return self.path / "blobs"

    @property
    def logs(self) -> Path:
        """The mirrored logs."""
        return self.path / "logs"

    @property
    def secrets(self) -> Path:
        """One file per workflow with values of ``--set-env`` and credentials, and the key of tokens and signatures."""
        return self.path / "secrets"

    @property
    def credentials(self) -> Path:
        """This user's credentials, one file each."""
        return self.path / "credentials"

    @property
    def profile(self) -> Path:
        """This user's preferences."""
        return self.path / "profile.json"

    @property
    def syncs(self) -> Path:
        """Records of the processes that copy files to running tasks."""
        return self.path / "rsync"

    @property
    def lock(self) -> Path:
        """Contains the supervisor's process id and version. A running supervisor keeps it locked, and ``blobs`` as well."""
        return self.path / "supervisor.lock"

    @property
    def supervisor_log(self) -> Path:
        """The supervisor's log."""
        return self.path / "supervisor.log"

    @property
    def crash_log(self) -> Path:
        """The traceback of the last bug in a command."""
        return self.path / "crash.log"

    @property
    def notify_lock(self) -> Path:
        """The process that sends notifications keeps it locked."""
        return self.path / "notify.lock"

    @property
    def socket(self) -> Path:
        """The socket through which other processes wake the supervisor."""
        return self.path / "supervisor.sock"

    def ensure(self) -> StateDirectory:
        """Create the directories with mode 0700 and return self.

        Raises ``StateError`` if they cannot be created or used, or belong to another user.
        """
        with state_errors(self.path):
            self.path.mkdir(parents=True, exist_ok=True, mode=0o700)
            self.check_owner()
            for folder in (self.blobs, self.logs, self.secrets):
                folder.mkdir(exist_ok=True, mode=0o700)
            if not os.access(self.path, os.W_OK | os.X_OK):
                raise PermissionError(13, "Permission denied", str(self.path))
            probe = self.path / f".probe-{os.getpid()}-{threading.get_ident()}"
            probe.write_bytes(b"x")
            probe.unlink()
        return self

    def check_owner(self) -> None:
        """Raise ``StateError`` if another user except root owns the directory: the owner could run commands as this user."""
        with state_errors(self.path):
            stranger = owned_by_stranger(self.path, os.environ)
        if stranger is not None:
            raise StateError(
                f"the state directory {self.path} belongs to {user_name(stranger)}, who could run commands as you",
                hint="point DISTFLOW_STATE at a directory of your own",
            )


@contextmanager
def state_errors(path: Path) -> Iterator[None]:
    """Convert the operating system's errors about the state directory to ``StateError``."""
    try:
        yield
    except OSError as error:
        where = error.filename or path
        raise StateError(
            f"cannot use the state directory: {where}: {error.strerror}",
            hint="free space there or make it writable, or point DISTFLOW_STATE at another directory",
        ) from error


def has_room(directory: StateDirectory) -> bool:
    """Return whether the state directory's disk has room for writing."""
    found = os.statvfs(directory.path)
    return found.f_bavail * found.f_frsize >= _ROOM


def find_state_directory(environ: Mapping[str, str]) -> StateDirectory:
    """Return ``$DISTFLOW_STATE``, else ``distflow/<host>`` in ``$XDG_STATE_HOME`` (default: ``~/.local/state``)."""
    if given := environ.get("DISTFLOW_STATE"):
        return StateDirectory(Path(given).expanduser().absolute())
    base = environ.get("XDG_STATE_HOME") or os.path.join(environ.get("HOME") or os.path.expanduser("~"), ".local", "state")
    return StateDirectory(Path(base) / "distflow" / os.uname().nodename)


def try_lock(handle: int) -> bool:
    """Lock an open file (``flock``) and return True, or return False if another process holds the lock.

    ``is_locked`` in another process holds the lock for a very short time, so a failed attempt is repeated a few times.
    """
    for pause_s in (*_LOCK_PAUSES_S, None):
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if pause_s is not None:
                threading.Event().wait(pause_s)
    return False


def is_locked(path: Path) -> bool:
    """Return whether a process holds the exclusive lock (``flock``) of a file or directory; False if that does not exist."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(handle)
    return False


def read_profile(file: Path) -> dict[str, Any]:
    """Return the settings of the profile: ``pool`` (the preferred pool) and ``notify``. Empty if the file does not exist.

    Raises ``StateError``.
    """
    try:
        with state_errors(file):
            return dict(json.loads(file.read_text()).items())
    except StateError as error:
        if isinstance(error.__cause__, FileNotFoundError | NotADirectoryError):
            return {}
        raise
    except (ValueError, AttributeError):
        raise StateError(f"the profile cannot be read: {file} is damaged", hint="remove it") from None


def write_profile(file: Path, key: str, value: object) -> None:
    """Store a setting of the profile; ``None`` for no preference. Raises ``StateError``."""
    found = read_profile(file) | {key: value}
    with state_errors(file):
        write_private(file, json.dumps(found).encode())


def write_private(path: Path, data: bytes) -> None:
    """Write or replace a file that only this user can read. After a crash or a power cut, it has its old or new content.

    Raises ``OSError``. A killed process may leave a temporary file ``.new-*`` next to the file.
    """
    new = path.with_name(f".new-{os.urandom(8).hex()}")
    try:
        with open(new, "xb", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
            file.write(data)
            publish(file, str(path))
    except BaseException:
        with suppress(OSError):
            os.unlink(new)
        raise
