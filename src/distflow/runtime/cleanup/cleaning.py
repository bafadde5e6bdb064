"""Listing and removing files of workflows on the node."""

from __future__ import annotations

import contextlib
import os
import shutil
from typing import List, Tuple

from distflow.runtime.cleanup import orphans
from distflow.runtime.clock import file_system_now
from distflow.runtime.files import attempts, log_files, secret_files
from distflow.runtime.files.blobs import BLOBS
from distflow.runtime.probes.facts import free_bytes
from distflow.runtime.wire import Json, OpError

__all__ = ["TRASH", "clean", "remove", "survey"]

_KEPT = {"output", "exit.json", "error.json", "launch.json", "workflow.json"}
TRASH = ".trash"
"""Directory of files that are being removed."""


def survey(root: str) -> Json:
    """Return every workflow with its size, its age and its living attempts."""
    at = file_system_now(root)
    workflows = []
    for uuid in attempts.workflows(root):
        try:
            measured = [_measure(path) for path in attempts.directories(root, uuid)]
        except FileNotFoundError:
            continue  # its last lease was just released, or another agent removes it
        if measured:
            size, modified = sum(one[0] for one in measured), max(one[1] for one in measured)
            workflows.append({"uuid": uuid, "bytes": size, "modified_at": modified, "alive": _alive(root, uuid)})
    blob_bytes = _measure(os.path.join(root, BLOBS))[0] if os.path.isdir(os.path.join(root, BLOBS)) else 0
    return {"workflows": workflows, "blob_bytes": blob_bytes, "free_bytes": free_bytes(root), "now": at}


def clean(root: str, workflow: str, keep_output: bool) -> Json:
    """Remove a workflow's directory, or everything in it except outputs and records. Refused while an attempt is alive."""
    alive = _alive(root, workflow)
    if alive:
        raise OpError("conflict", "it is still running: {}".format(", ".join(alive)))
    tops = attempts.directories(root, workflow)
    before = sum(_measure(top)[0] for top in tops)
    for _, directory in attempts.each(root, workflow):
        secret_files.remove(directory)  # needed if the pair was killed while no agent was running
    if keep_output:
        for _, directory in list(attempts.each(root, workflow)):
            for entry in list(os.scandir(directory)):
                if entry.name not in _KEPT and not log_files.is_output(entry.name):
                    remove(entry.path)
        return {"freed_bytes": before - sum(_measure(top)[0] for top in tops)}
    # Moved away first, so that a partly removed workflow does not look complete.
    trash = os.path.join(root, TRASH)
    hidden = []
    for number, top in enumerate(tops):
        os.makedirs(trash, mode=0o700, exist_ok=True)
        hidden.append(os.path.join(trash, "{}-{}-{}".format(workflow, os.getpid(), number)))
        try:
            os.rename(top, hidden[-1])
        except FileNotFoundError:  # another agent has moved it
            return {"freed_bytes": 0}
    if os.path.isdir(trash):
        for name in os.listdir(trash):  # also leftovers of earlier or interrupted removals
            with contextlib.suppress(OSError):
                remove(os.path.join(trash, name))
    for path in hidden:
        remove(path)
    return {"freed_bytes": before}


def _alive(root: str, workflow: str) -> List[str]:
    return [attempt for attempt, directory in attempts.each(root, workflow) if orphans.may_live(directory)]


def remove(path: str) -> None:
    """Remove a file or directory, if it exists. Raises ``OSError`` naming the obstacle, such as files of a container's root."""
    if os.path.islink(path) or not os.path.isdir(path):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        return
    _open(path)
    for folder, names, _ in os.walk(path):
        for name in names:
            _open(os.path.join(folder, name))
    shutil.rmtree(path)


def _open(folder: str) -> None:
    """Restore the owner's access to a directory that a task has closed, such as a cache of Go modules."""
    if not os.path.islink(folder) and not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
        with contextlib.suppress(OSError):
            os.chmod(folder, 0o700)


def _measure(top: str) -> Tuple[int, float]:
    """Return the bytes on disk below ``top``, and the time of the last change in it."""
    info = os.lstat(top)
    size, modified = info.st_blocks * 512, info.st_mtime
    for folder, _, names in os.walk(top):
        for name in names:
            try:
                info = os.lstat(os.path.join(folder, name))
            except OSError:
                continue
            size += info.st_blocks * 512
            modified = max(modified, info.st_mtime)
    return size, modified
