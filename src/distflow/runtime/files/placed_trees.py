"""Taking over the unchanged files of an ended attempt, instead of unpacking the same archive again.

Tasks may change their files, so two attempts never share a file. But an ended attempt no longer needs the files that were sent
to it. The files that it did not change are moved to the next attempt with the same archive. Files that it changed or created
stay. After a large archive was unpacked, a record in the attempt's directory contains the state of each of its files. A write,
``chmod``, ``utime`` or new link changes that state.
"""

from __future__ import annotations

import contextlib
import os
import select
import stat

from distflow.protocol.light_typing import Dict, Iterator, List, Optional, Set, Tuple
from distflow.runtime import processes
from distflow.runtime.files.blobs import path_of
from distflow.runtime.files.records import read_end, read_state
from distflow.runtime.files.safe_files import path_inside
from distflow.runtime.wire import OpError

__all__ = ["FOLDER", "is_in_output", "record", "take_over"]

FOLDER = "placed"
"""The directory below an attempt's directory with the records of its archives, which are named by the archives' digests."""
_ATTEMPTS_SUFFIX = ".users"
"""The suffix of the file next to a blob that lists the attempts with a record of it."""
_TAKEN = ".taken"
_FEW_ENTRIES = 100
_SMALL_BYTES = 16 << 20
"""Archives with few entries and few bytes are not recorded, because unpacking them again is fast."""
_MAX_ATTEMPTS = 64
_TICK_S = 0.05
"""File times are only as fine as a clock tick. A write that is this much later certainly changes them."""
_MOST_ENTRIES = 200_000
"""If an attempt's directory has this many entries, its files are not taken over: the search for links would take too long."""
_UNRECORDED = ""

State = str
"""Mode, size, times and inode of a file, or the mode of a directory."""


def take_over(root: str, digest: str, top: str) -> Optional[Tuple[Dict[str, Optional[State]], Set[str]]]:
    """Move the unchanged files of an ended attempt with the same archive to the new directory ``top``.

    Returns the names that are now in ``top``, each with its state or, if the move changed the state, ``None``; and the other
    names of the archive. Returns ``None`` if the whole archive must be unpacked: there is no such attempt, ``top`` is not
    empty, or the move failed.
    """
    if os.path.lexists(top) and (os.path.islink(top) or not os.path.isdir(top) or os.listdir(top)):
        return None  # other files were placed there, or an earlier try was interrupted
    for directory in _attempts_with_record(root, digest):
        path = os.path.join(directory, FOLDER, digest)
        try:
            relative, states = _read(path)
            old = path_inside(directory, relative)
            if not _is_settled(directory) or is_in_output(directory, old) or _is_linked(directory, old, states):
                continue
            if _is_in_use(os.path.relpath(directory, root), directory, old):
                continue
            os.rename(path, path + _TAKEN)
        except (OSError, OpError, ValueError):
            continue  # another attempt was faster, or the attempt is being removed
        try:
            tree = _Tree(old, states)
            os.makedirs(top, exist_ok=True)  # the working directory exists already
            moved = dict(_move(tree, top, ""))
            os.unlink(path + _TAKEN)
            return moved, states.keys() - moved.keys()
        except (OSError, ValueError, RecursionError):
            return None  # for example, the attempt is being removed: the caller unpacks the whole archive
    return None


def record(root: str, directory: str, relative: str, digest: str, states: Dict[str, Optional[State]]) -> None:
    """Record the state of the files of an archive that was unpacked to ``relative`` in the directory of an attempt.

    The attempt must not have started. ``states`` has the state of each file and directory of the archive, or ``None`` if it is
    not known yet. Nothing is recorded for small archives, if the file system cannot show changes, or if writing fails.
    """
    unknown = [name for name, state in states.items() if state is None]
    try:
        is_small = len(states) < _FEW_ENTRIES and os.stat(path_of(root, digest)).st_size < _SMALL_BYTES
        if is_small or any("\0" in name for name in unknown):
            return
        if unknown:
            select.select([], [], [], _TICK_S)
            found = {name: os.lstat(os.path.join(directory, relative, name)) for name in unknown}
            if all(info.st_ctime_ns % 10**9 == 0 for info in found.values()):
                return  # this file system keeps whole seconds, in which a file may change without a trace
            states = {**states, **{name: _state(info) for name, info in found.items()}}
        parts = [relative, *(text for pair in states.items() for text in pair)]
        os.makedirs(os.path.join(directory, FOLDER), mode=0o700, exist_ok=True)
        path = os.path.join(directory, FOLDER, digest)
        with open(path + ".new", "w", encoding="utf-8", errors="surrogateescape") as file:
            file.write("\0".join(map(str, parts)))
        os.rename(path + ".new", path)
        with open(path_of(root, digest) + _ATTEMPTS_SUFFIX, "a", encoding="utf-8", errors="surrogateescape") as file:
            file.write(os.path.relpath(directory, root) + "\n")
    except OSError:
        return  # for example, the disk is full; the task can start without a record


def _state(info: os.stat_result) -> State:
    if stat.S_ISDIR(info.st_mode):
        return str(info.st_mode)
    known = (info.st_mode, info.st_size, info.st_mtime_ns, info.st_ctime_ns, info.st_ino)
    return " ".join(map(str, known))


def _attempts_with_record(root: str, digest: str) -> List[str]:
    """Return the directories of attempts that may have a record of the archive, the latest first."""
    path = path_of(root, digest) + _ATTEMPTS_SUFFIX
    try:
        with open(path, encoding="utf-8", errors="surrogateescape") as file:
            lines = file.read().splitlines()
    except OSError:
        return []
    found = []
    for line in reversed(lines):
        try:
            directory = path_inside(root, line)
        except OpError:
            continue
        if os.path.exists(os.path.join(directory, FOLDER, digest)) and directory not in found:
            found.append(directory)
    if len(lines) > _MAX_ATTEMPTS:
        # The name is unique, because other processes may do the same. If the disk is full, the file remains until it is removed
        # like other old parts of blobs.
        new = "{}.{}.part".format(path, os.getpid())
        with contextlib.suppress(OSError):
            with open(new, "w", encoding="utf-8", errors="surrogateescape") as file:
                file.write("".join(os.path.relpath(one, root) + "\n" for one in reversed(found[:_MAX_ATTEMPTS])))
            os.rename(new, path)
    return found


def _is_settled(directory: str) -> bool:
    """Return whether the attempt has ended, and the keeper saw that none of its processes could still write files.

    It must have run on this machine since the last boot, because a power cut may restore old times of changed files. Machines
    may share a root, but cannot see each other's processes.
    """
    end, state = read_end(directory), read_state(directory)
    if end is None or state is None or end.get("all_ended") is not True:
        return False
    return state.get("boot_id") == processes.boot_id() and state.get("host") == os.uname().nodename


def _is_in_use(attempt: str, directory: str, top: str) -> bool:
    """Return whether a visible process has its working directory in ``directory`` or an open file in ``top``.

    Processes with the attempt's name in their environment count, too.
    """
    mark, within, inside = "DISTFLOW_ATTEMPT=" + attempt, os.path.realpath(directory) + os.sep, os.path.realpath(top) + os.sep
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            if (os.readlink("/proc/{}/cwd".format(pid)) + os.sep).startswith(within) or processes.has_variable(int(pid), mark):
                return True
            for number in os.listdir("/proc/{}/fd".format(pid)):
                with contextlib.suppress(OSError):  # it was closed
                    if os.readlink("/proc/{}/fd/{}".format(pid, number)).startswith(inside):
                        return True
        except OSError:
            continue  # it has ended, or belongs to another user
    return False


def is_in_output(directory: str, path: str) -> bool:
    """Return whether ``path`` is part of the output of the attempt in ``directory``, which has to stay complete."""
    output = os.path.realpath(os.path.join(directory, "output")) + os.sep
    return (os.path.realpath(path) + os.sep).startswith(output)


def _is_linked(directory: str, top: str, states: Dict[str, State]) -> bool:
    """Return whether a link in the attempt's ``directory`` leads to ``top``, or to a recorded file or directory in it.

    The output may contain such links. distflow transfers it with the contents of their targets, so these targets must not be
    moved. Also returns true if the directory has too many entries to search.
    """
    real_top, left, folders = os.path.realpath(top), _MOST_ENTRIES, [directory]
    while folders:
        with os.scandir(folders.pop()) as entries:
            for entry in entries:
                left -= 1
                if not left:
                    return True
                if entry.is_symlink():
                    target = os.path.relpath(os.path.realpath(entry.path), real_top)
                    if target == "." or target in states:
                        return True
                elif entry.is_dir(follow_symlinks=False):
                    folders.append(entry.path)
    return False


def _read(path: str) -> Tuple[str, Dict[str, State]]:
    with open(path, encoding="utf-8", errors="surrogateescape") as file:
        relative, *rest = file.read().split("\0")
    pairs = iter(rest)
    return relative, dict(zip(pairs, pairs))  # noqa: B905  Python 3.8 has no ``strict``


class _Tree:
    """The files of an ended attempt, compared with its record."""

    def __init__(self, top: str, states: Dict[str, State]) -> None:
        """Read the directories. ``states`` are the recorded states by name."""
        self.top = top
        self.same: Dict[str, List[str]] = {}
        """The unchanged entries of each directory, by its name; directories first."""
        self.whole: Set[str] = set()
        """The directories that have exactly the unchanged files of the archive, and can be moved as they are."""
        self.states = states
        self._counts: Dict[str, int] = {}
        for name in states:
            parent = os.path.dirname(name)
            self._counts[parent] = self._counts.get(parent, 0) + 1
        if not stat.S_ISDIR(os.lstat(top).st_mode):
            raise ValueError("the task replaced the directory")
        self._compare("")

    def _compare(self, folder: str) -> None:
        folders, files, others = [], [], 0
        with os.scandir(os.path.join(self.top, folder)) as entries:
            for entry in entries:
                name = "{}/{}".format(folder, entry.name) if folder else entry.name
                if self.states.get(name, _UNRECORDED) != _state(entry.stat(follow_symlinks=False)):
                    others += 1
                elif entry.is_dir(follow_symlinks=False):
                    folders.append(name)
                else:
                    files.append(name)
        for name in folders:
            self._compare(name)
        self.same[folder] = folders + files
        if not others and len(self.same[folder]) == self._counts.get(folder, 0) and self.whole.issuperset(folders):
            self.whole.add(folder)


def _move(tree: _Tree, new: str, folder: str) -> Iterator[Tuple[str, Optional[State]]]:
    """Move the unchanged entries of a directory. Yield their names, with their states if the move did not change them."""
    for name in tree.same[folder]:
        old, target = os.path.join(tree.top, name), os.path.join(new, name)
        if name not in tree.same:  # a file
            os.rename(old, target)
        elif name in tree.whole:
            os.rename(old, target)
            yield name, tree.states[name]
            yield from _below(tree, name)
            continue
        else:
            os.mkdir(target)
            yield from _move(tree, new, name)
            os.chmod(target, stat.S_IMODE(os.lstat(old).st_mode))
        yield name, None


def _below(tree: _Tree, folder: str) -> Iterator[Tuple[str, State]]:
    for name in tree.same[folder]:
        yield name, tree.states[name]
        if name in tree.same:
            yield from _below(tree, name)
