"""Removing distflow from the node: its root, its lock files, and its files in memory. Refused while an attempt is alive."""

from __future__ import annotations

import os
import re
from typing import Callable, List

from distflow.runtime.cleanup import orphans
from distflow.runtime.cleanup.cleaning import TRASH
from distflow.runtime.cleanup.cleaning import remove as remove_tree
from distflow.runtime.files import attempts, root_directory, secret_files
from distflow.runtime.files.blobs import BLOBS, earlier_blobs
from distflow.runtime.leases import lease_files
from distflow.runtime.wire import Json, OpError

__all__ = ["uninstall"]

_BLOB = re.compile(r"\.unmarked|(pack-)?[0-9a-f]{16,64}(\.part|\.new|\.[0-9]+-[0-9]+\.part)?")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_DIRECTORIES = ("images", TRASH, "runtime")
_EARLIER = {
    BLOBS: _BLOB,
    "images": re.compile(r"[0-9a-f]{32}\.sif"),
    TRASH: re.compile(r"[0-9a-f-]{32,36}-[0-9]+"),
    "runtime": _DIGEST,
}
"""Names of files that an earlier version left and that cannot be proved to be distflow's."""
_LOCK = re.compile(r"(gpu|port)-[0-9]+\.lock|claim-[0-9]+-[0-9]+\.lock|ticket-[0-9]+-[0-9a-f]{16}\.json")


def uninstall(root: str, request: Json) -> Json:
    """Remove all files of distflow. Returns the ``removed`` paths, and the ``left`` ones with the cause."""
    alive = [
        name
        for workflow in attempts.workflows(root)
        for name, place in attempts.each(root, workflow)
        if orphans.may_live(place)
    ]
    if alive:
        raise OpError("conflict", "tasks run here: {}".format(", ".join(alive[:5])))
    removed: List[str] = []
    left: List[str] = []
    for workflow in attempts.workflows(root):
        for _, directory in attempts.each(root, workflow):
            secret_files.remove(directory)
    lease_dir = os.path.abspath(os.path.expanduser(str(request.get("lease_dir") or "")))
    if request.get("lease_dir") and os.path.isdir(lease_dir):
        _remove_locks(lease_dir, removed, left)
    _remove_root(root, removed, left)
    return {"removed": removed, "left": left}


def _remove_locks(path: str, removed: List[str], left: List[str]) -> None:
    """Remove this user's free lock files. A process that is just taking one notices that it is gone."""
    try:
        directory = lease_files.open_directory(path)
    except OpError as error:
        left.append("{}: {}".format(path, error.message))
        return
    try:
        for name in sorted(os.listdir(directory)):
            if not _LOCK.fullmatch(name) or os.stat(name, dir_fd=directory, follow_symlinks=False).st_uid != os.getuid():
                continue
            fd, holder = lease_files.lock(directory, name, {})
            if fd < 0:
                left.append("{}: it is held by {}".format(os.path.join(path, name), holder))
                continue
            os.unlink(name, dir_fd=directory)
            os.close(fd)
            removed.append(os.path.join(path, name))
        others = len(os.listdir(directory))
    finally:
        os.close(directory)
    if others:
        left.append("{}: {} in it that are held, or of other users".format(path, _files(others)))
    elif _try(os.rmdir, path, left):
        removed.append(path)


def _remove_root(root: str, removed: List[str], left: List[str]) -> None:
    """Remove workflows, then the private directory, then ``root`` itself if it is empty."""
    for workflow in attempts.workflows(root):
        removed.extend(path for path in attempts.directories(root, workflow) if _try(remove_tree, path, left))
    earlier = root_directory.earlier_root(root)
    if earlier is not None:
        _remove_earlier(root, earlier, removed, left)
    _remove_private(root, removed, left)
    if earlier is not None and not os.listdir(earlier) and _try(os.rmdir, earlier, left):
        removed.append(earlier)


def _remove_private(root: str, removed: List[str], left: List[str]) -> None:
    """Remove the private directory: the runtime and the marker last, so that a failed removal can be repeated."""
    for name in sorted(set(os.listdir(root)) - {"runtime", root_directory.MARKER}) + ["runtime"]:
        path = os.path.join(root, name)
        if name == BLOBS:
            for blob in os.listdir(path):
                if _BLOB.fullmatch(blob):
                    _try(os.unlink, os.path.join(path, blob), left)
            if os.listdir(path):
                left.append("{}: there are files in it that are not distflow's".format(path))
            elif _try(os.rmdir, path, left):
                removed.append(path)
        elif name in _DIRECTORIES:
            if os.path.lexists(path) and _try(remove_tree, path, left):
                removed.append(path)
        else:
            left.append("{}: it is not distflow's".format(path))
    if set(os.listdir(root)) <= {root_directory.MARKER}:
        _try(os.unlink, os.path.join(root, root_directory.MARKER), left)
        if _try(os.rmdir, root, left):
            removed.append(root)


def _remove_earlier(root: str, earlier: str, removed: List[str], left: List[str]) -> None:
    """Remove files that an earlier version left in the configured directory and that provably come from distflow."""
    mine = {BLOBS: earlier_blobs(root), "runtime": [path for path in _listed(earlier, "runtime") if _is_runtime(path)]}
    for name, paths in mine.items():
        emptied = [path for path in paths if _try(remove_tree, path, left)]
        folder = os.path.join(earlier, name)
        unmarked = os.path.join(folder, ".unmarked")
        if emptied and os.listdir(folder) == [".unmarked"]:
            _try(os.unlink, unmarked, left)
        if emptied and not os.listdir(folder) and _try(os.rmdir, folder, left):
            removed.append(folder)
    for name, pattern in _EARLIER.items():
        if any(pattern.fullmatch(os.path.basename(path)) for path in _listed(earlier, name)):
            said = "{}: an earlier version of distflow may have made it; look into it and remove it by hand"
            left.append(said.format(os.path.join(earlier, name)))


def _listed(top: str, name: str) -> List[str]:
    """Return the paths in a directory of this user; none if it does not exist."""
    path = os.path.join(top, name)
    return [os.path.join(path, one) for one in sorted(os.listdir(path))] if root_directory.is_own_directory(path) else []


def _is_runtime(path: str) -> bool:
    if not _DIGEST.fullmatch(os.path.basename(path)) or not root_directory.is_own_directory(path):
        return False
    return os.listdir(path) == ["distflow"] and os.path.isfile(os.path.join(path, "distflow/runtime/agent/server.py"))


def _files(count: int) -> str:
    return "{} file{}".format(count, "" if count == 1 else "s")


def _try(remove: Callable[[str], object], path: str, left: List[str]) -> bool:
    try:
        remove(path)
    except OSError as error:
        left.append("{}: {}".format(error.filename or path, error.strerror))
        return False
    return True
