"""Credentials of a task as files: a directory for each, in memory where the node has that, gone with the attempt.

They lie in ``/dev/shm/distflow-<uid>/<digest of the attempt's directory>/``, else in the attempt's ``credentials/``, and a link
leads there from where the task looks for them. The place follows from the attempt's directory alone, so that whoever ends the
attempt can remove them: the keeper, the runner, or an agent that finds both gone.
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
"""In each folder in memory: a link to the attempt's directory."""


def place(directory: str, entries: List[Json]) -> None:
    """Write the files of every entry (``path``, ``files``: name → content) anew, and the links that lead to them."""
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
    """Remove what was placed; harmless where nothing is."""
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
        pass  # it is not there, or others have something in it


def memory_folder() -> Optional[str]:
    """A folder in memory that only this user can look into; None where there is none. Empty, it may vanish at any time."""
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
    import hashlib  # a tenth of an agent's start, and most attempts have no credentials

    return os.path.join(_parent(), hashlib.sha256(os.fsencode(os.path.realpath(directory))).hexdigest()[:32])


def _is_ours(path: str) -> bool:
    """Whether nobody else can have made the directory, or can change what is in it."""
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
    """Where the files are in memory now; None when they cannot be."""
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
            continue  # whoever emptied the parent just removed it
        except OSError:
            remove(directory)
            return None
    return None


def _sweep() -> None:
    """Remove what is there of attempts that have ended, or are gone: their pairs were killed, and no agent came back."""
    import shutil

    for name in os.listdir(_parent()):
        home = os.path.join(_parent(), name)
        try:
            owner = os.readlink(os.path.join(home, _OWNER))
        except OSError:
            continue  # it is just being filled, or is none of these
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
