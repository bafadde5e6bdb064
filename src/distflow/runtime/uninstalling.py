"""Removing distflow from the node: its root, its lock files, and what it has in memory. Refused while anything lives there."""

from __future__ import annotations

import os
import re
import shutil
from typing import Callable, List

from distflow.runtime import attempts, leasefiles, orphans, secretfiles
from distflow.runtime.blobs import BLOBS
from distflow.runtime.wire import Json, OpError

__all__ = ["uninstall"]

_UUID = re.compile(r"[0-9a-f]{8}(-?)[0-9a-f]{4}(\1[0-9a-f]{4}){3}[0-9a-f]{8}")
_BLOB = re.compile(r"[0-9a-f]{64}(\.part|\.new)?")
_LOCK = re.compile(r"(gpu|port)-[0-9]+\.lock|claim-[0-9]+-[0-9]+\.lock")


def uninstall(root: str, request: Json) -> Json:
    """Remove all that is distflow's, and say what was ``removed`` and what was ``left``, and why."""
    alive = [
        name
        for workflow in attempts.workflows(root)
        for name, place in attempts.each(root, workflow)
        if orphans.may_live(place)
    ]
    if alive:
        raise OpError("conflict", "it is still at work here: {}".format(", ".join(alive[:5])))
    removed: List[str] = []
    left: List[str] = []
    for workflow in attempts.workflows(root):
        for _, directory in attempts.each(root, workflow):
            secretfiles.remove(directory)
    lease_dir = os.path.abspath(os.path.expanduser(str(request.get("lease_dir") or "")))
    if request.get("lease_dir") and os.path.isdir(lease_dir):
        _remove_locks(lease_dir, removed, left)
    _remove_root(root, removed, left)
    return {"removed": removed, "left": left}


def _remove_locks(path: str, removed: List[str], left: List[str]) -> None:
    """Remove our lock files that nobody holds; who is just taking one notices that it is gone."""
    try:
        directory = leasefiles.open_directory(path)
    except OpError as error:
        left.append("{}: {}".format(path, error.message))
        return
    try:
        for name in sorted(os.listdir(directory)):
            if not _LOCK.fullmatch(name) or os.stat(name, dir_fd=directory, follow_symlinks=False).st_uid != os.getuid():
                continue
            fd, holder = leasefiles.lock(directory, name, {})
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
    """Remove what we have made in the root; the runtime last, and the root itself when nothing else is in it."""
    names = sorted(os.listdir(root), key=lambda name: (name == "runtime", name))
    for name in names:
        path = os.path.join(root, name)
        if name == BLOBS:
            for blob in os.listdir(path):
                if _BLOB.fullmatch(blob):
                    _try(os.unlink, os.path.join(path, blob), left)
            if os.listdir(path):
                left.append("{}: there are files in it that are not distflow's".format(path))
            elif _try(os.rmdir, path, left):
                removed.append(path)
        elif name in ("runtime", "images", ".trash") or _UUID.fullmatch(name):
            if _try(shutil.rmtree, path, left):
                removed.append(path)
        else:
            left.append("{}: it is not distflow's".format(path))
    if not os.listdir(root) and _try(os.rmdir, root, left):
        removed.append(root)


def _files(count: int) -> str:
    return "{} file{}".format(count, "" if count == 1 else "s")


def _try(remove: Callable[[str], object], path: str, left: List[str]) -> bool:
    try:
        remove(path)
    except OSError as error:
        left.append("{}: {}".format(error.filename or path, error.strerror))
        return False
    return True
