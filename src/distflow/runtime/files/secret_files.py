"""A task's credentials as files: one directory for each, in memory if possible, removed with the attempt.

They are in ``/dev/shm/distflow-<uid>/<digest of the attempt's directory>/``, or else in the attempt's ``credentials/``. Links
lead there from the paths that the task uses. The location depends only on the attempt's directory, so that every process that
ends the attempt can remove them: the keeper, the runner, or an agent that finds both gone.
"""

from __future__ import annotations

import os
import stat
from typing import Dict, List, Optional

from distflow.runtime.files.safe_paths import inside
from distflow.runtime.wire import Json, OpError

__all__ = ["ON_DISK", "memory_folder", "place", "remove"]

ON_DISK = "credentials"
_MEMORY = "/dev/shm"
_TRIES = 5
_OWNER = "attempt"
"""Name of the link to the attempt's directory, in each folder in memory."""


def place(directory: str, entries: List[Json]) -> None:
    """Write the files of every entry (``path``, ``files``: name → content), and the links that lead to them.

    Earlier files are removed.
    """
    remove(directory)
    if not entries:
        return
    contents = [entry["files"] for entry in entries]
    try:
        home = _fill_memory(directory, contents) or _fill(os.path.join(directory, ON_DISK), contents)
        for position, entry in enumerate(entries):
            link = inside(directory, str(entry["path"]))
            os.makedirs(os.path.dirname(link), mode=0o700, exist_ok=True)
            if os.path.islink(link):
                os.unlink(link)
            os.symlink(os.path.join(home, str(position)), link)
    except OSError as error:
        raise OpError.from_os(error, "the files of the task's credentials cannot be placed") from error


def remove(directory: str) -> None:
    """Remove the placed files; does nothing if there are none."""
    parent = _parent()
    homes = [os.path.join(directory, ON_DISK)]
    if _is_ours(parent):
        homes.append(_in_memory(directory))
    for home in homes:
        if os.path.isdir(home) and not os.path.islink(home):
            import shutil

            shutil.rmtree(home, ignore_errors=True)
    try:
        os.rmdir(parent)
    except OSError:
        pass  # it does not exist, or files of other attempts are in it


def memory_folder() -> Optional[str]:
    """Return a folder in memory that only this user can access; None if there is none. An empty one may vanish at any time."""
    if not _has_memory():
        return None
    try:
        os.makedirs(_parent(), mode=0o700, exist_ok=True)
    except OSError:
        return None
    return _parent() if _is_ours(_parent()) else None


def _parent() -> str:
    return os.path.join(_MEMORY, "distflow-{}".format(os.getuid()))


def _in_memory(directory: str) -> str:
    import hashlib  # importing it takes a tenth of an agent's start, and most attempts have no credentials

    return os.path.join(_parent(), hashlib.sha256(os.fsencode(os.path.realpath(directory))).hexdigest()[:32])


def _is_ours(path: str) -> bool:
    """Whether this user created the directory and no other user can change it."""
    try:
        info = os.lstat(path)
    except OSError:
        return False
    return stat.S_ISDIR(info.st_mode) and info.st_uid == os.getuid() and not info.st_mode & 0o077


def _has_memory() -> bool:
    try:
        with open("/proc/self/mounts", encoding="utf-8", errors="replace") as file:
            mounts = [line.split() for line in file]
    except OSError:
        return False
    kinds = [fields[2] for fields in mounts if len(fields) > 2 and fields[1] == _MEMORY]
    return bool(kinds) and kinds[-1] in ("tmpfs", "ramfs")


def _fill_memory(directory: str, contents: List[Dict[str, str]]) -> Optional[str]:
    """Write the files to memory. Returns their directory, or None if that is not possible."""
    if not _has_memory():
        return None
    home = _in_memory(directory)
    for _ in range(_TRIES):
        try:
            os.makedirs(_parent(), mode=0o700, exist_ok=True)
            if not _is_ours(_parent()):
                return None
            _sweep()
            _fill(home, contents)
            os.symlink(os.path.realpath(directory), os.path.join(home, _OWNER))
            return home
        except FileNotFoundError:
            continue  # another process has just removed the empty parent
        except OSError:
            remove(directory)
            return None
    return None


def _sweep() -> None:
    """Remove files of attempts that have ended or are gone: their pairs were killed, and no agent removed the files."""
    import shutil

    for name in os.listdir(_parent()):
        home = os.path.join(_parent(), name)
        try:
            owner = os.readlink(os.path.join(home, _OWNER))
        except OSError:
            continue  # another process is filling it, or it is a different directory
        if not os.path.isdir(owner) or os.path.exists(os.path.join(owner, "exit.json")):
            shutil.rmtree(home, ignore_errors=True)


def _fill(home: str, contents: List[Dict[str, str]]) -> str:
    os.mkdir(home, 0o700)
    for position, files in enumerate(contents):
        folder = os.path.join(home, str(position))
        os.mkdir(folder, 0o700)
        for name, content in files.items():
            fd = os.open(os.path.join(folder, name), os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
            with os.fdopen(fd, "wb") as file:
                file.write(content.encode("utf-8", "surrogateescape"))
    return home
