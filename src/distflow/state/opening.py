"""Open the store's file, copy a file that this user cannot write, and rename a damaged one.

None of these functions removes a store.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from distflow.errors import RecordUnreadable, StateError, StoreBroken
from distflow.state.codec import DecodeError

if TYPE_CHECKING:
    from tempfile import TemporaryDirectory

__all__ = ["connect", "copy_to_read", "exclusive", "is_broken", "is_damage", "is_read_only", "set_aside", "state_error"]

_ENDINGS = ("", "-wal")
"""The suffixes of the database and of its write-ahead log. SQLite can create the third file, ``-shm``, again."""


def connect(path: Path) -> sqlite3.Connection:
    """Return a connection to the file, which is created if it does not exist."""
    if not path.exists():
        # SQLite would create it with the umask's mode.
        os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))
    return sqlite3.connect(path, timeout=30.0, isolation_level=None, check_same_thread=False)


def is_read_only(path: Path) -> bool:
    """Return whether the file exists, and this user may not write to it or to its directory."""
    return path.exists() and not (os.access(path, os.W_OK) and os.access(path.parent, os.W_OK | os.X_OK))


def copy_to_read(path: Path) -> TemporaryDirectory[str]:
    """Copy the file and its latest writes to a temporary directory.

    SQLite needs write access to the directory of a database in WAL mode, even to read it. Raises ``OSError``, or ``StateError``
    if no temporary directory can be created.
    """
    import shutil  # noqa: PLC0415  these two are needed only here, and would slow down every other start
    import tempfile  # noqa: PLC0415

    try:
        folder = tempfile.TemporaryDirectory(prefix="distflow-")
    except FileNotFoundError:
        raise StateError(
            f"cannot use {path}: it is read-only, and no directory for a temporary copy of it is writable",
            hint="set TMPDIR to a writable directory with free space",
        ) from None
    try:
        for ending in _ENDINGS:
            with contextlib.suppress(FileNotFoundError) if ending else contextlib.nullcontext():
                shutil.copyfile(f"{path}{ending}", Path(folder.name) / f"{path.name}{ending}")
    except BaseException:
        folder.cleanup()
        raise
    return folder


def state_error(path: Path, error: Exception) -> StateError:
    """Return the ``StateError`` for an error of SQLite, the operating system or the decoding of a record, with a hint."""
    if is_damage(error):
        return StoreBroken(
            f"{path} is damaged and cannot be read: {error}",
            hint="`distflow workflow adopt` sets it aside and creates a new one from the records on the nodes;"
            " running tasks are not affected. Or point DISTFLOW_STATE at another directory",
        )
    if isinstance(error, DecodeError):
        return RecordUnreadable(
            f"a record in {path} cannot be read: {error}",
            hint="use the version of distflow that wrote this record; other workflows are not affected",
        )
    if isinstance(error, sqlite3.OperationalError) and "locked" in str(error):
        return StateError(f"cannot use {path}: {error}", hint="another process is using it; try again")
    where, why = path, str(error)
    if isinstance(error, OSError):
        # The second name is the target of a copy, such as a file in a full directory for temporary files.
        where, why = error.filename2 or error.filename or path, error.strerror or why
    return StateError(
        f"cannot use {where}: {why}",
        hint="free space there or make it writable, or point DISTFLOW_STATE at another directory",
    )


def is_damage(error: Exception) -> bool:
    """Return whether SQLite reports damaged content. Its errors for a locked, full or forbidden file have other classes."""
    return type(error) is sqlite3.DatabaseError


def is_broken(path: Path) -> bool:
    """Return whether SQLite can open the file but finds it damaged; False for a file that is locked or that it cannot open."""
    try:
        with path.open("rb"):
            pass
        db = sqlite3.connect(path, timeout=1.0, isolation_level=None)
    except (OSError, sqlite3.Error):
        return False
    try:
        return bool(db.execute("PRAGMA quick_check(1)").fetchone() != ("ok",))
    except sqlite3.Error as error:
        return is_damage(error)
    finally:
        db.close()


def set_aside(path: Path, day: str) -> Path | None:
    """Rename a damaged file to ``<name>.broken-<day>`` and return its new path.

    Returns ``None`` if the file is not damaged, cannot be written or does not exist.

    No process may be using the file. Raises ``OSError``.
    """
    with exclusive(path.parent):
        if not path.exists() or is_read_only(path) or not is_broken(path):
            return None
        target, number = Path(f"{path}.broken-{day}"), 1
        while target.exists():
            number += 1
            target = Path(f"{path}.broken-{day}-{number}")
        # The file itself is renamed last. After a crash, the next process still finds it, and renames it.
        for ending in reversed(_ENDINGS):
            with contextlib.suppress(FileNotFoundError):
                os.rename(f"{path}{ending}", f"{target}{ending}")
        Path(f"{path}-shm").unlink(missing_ok=True)
        return target


@contextmanager
def exclusive(folder: Path) -> Iterator[None]:
    """Let one process at a time open the store: SQLite refuses others immediately while a process converts a file to WAL."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)
