"""The workflows on this node: list them, read the submitter's memos on them, remove them, and remove distflow itself.

A workflow is not removed while one of its attempts is alive.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil

from distflow.protocol.light_typing import Callable, Dict, Iterator, List, Optional, Set, Tuple
from distflow.runtime.cleanup import orphans
from distflow.runtime.clock import file_system_now
from distflow.runtime.files import attempt_files, attempts, log_files, root_directory, venvs
from distflow.runtime.files.attempt_files import MEMO
from distflow.runtime.files.blobs import BLOBS, earlier_blobs
from distflow.runtime.files.safe_files import open_locked
from distflow.runtime.leases import lease_files
from distflow.runtime.probes.facts import free_bytes
from distflow.runtime.untrusted import decode_object
from distflow.runtime.wire import MAX_LINE, Json, OpError

__all__ = ["clean", "list_unknown_workflows", "remove_venv", "survey", "uninstall"]


_KEPT = {"output", "exit.json", "error.json", "launch.json", "workflow.json"}
_TRASH = ".trash"
"""Directory of files that are being removed."""
_REMOVED = ".removed-"
"""The prefix of an attempt's directories that are being removed."""


def survey(root: str) -> Json:
    """Return every workflow with its size, last change and living attempts; the Python environments; and the disk space."""
    at = file_system_now(root)
    workflows = []
    for uuid in attempts.workflows(root):
        try:
            measured = [_measure(path) for path in attempts.workflow_directories(root, uuid)]
        except FileNotFoundError:
            continue  # the workflow's last lease was just released, or another agent is removing the workflow
        if measured:
            size, modified = sum(one[0] for one in measured), max(one[1] for one in measured)
            workflows.append({"uuid": uuid, "bytes": size, "modified_at": modified, "alive": _alive(root, uuid)})
    blob_bytes = _measure(os.path.join(root, BLOBS))[0] if os.path.isdir(os.path.join(root, BLOBS)) else 0
    return {
        "workflows": workflows,
        "venvs": _survey_venvs(root),
        "blob_bytes": blob_bytes,
        "free_bytes": free_bytes(root),
        "now": at,
    }


def _survey_venvs(root: str) -> List[Json]:
    """Return every Python environment with its size, its last use, and whether a task or a builder may use it."""
    found: List[Json] = []
    present = list(venvs.list_venvs(root))
    used = _used_venvs(root) if present else None
    for key, directory in present:
        record = venvs.read_record(directory)
        try:
            about = os.stat(directory if record is None else os.path.join(directory, venvs.COMPLETE))
            size = _measure(directory)[0]
        except FileNotFoundError:
            continue
        lock = open_locked(venvs.lock_of(directory))
        if lock is not None:
            os.close(lock)
        found.append({
            "key": key, "file": str((record or {}).get("file", "")), "bytes": size, "used_at": about.st_mtime,
            "in_use": lock is None or used is None or key in used,
        })  # fmt: skip
    return found


def _used_venvs(root: str) -> Optional[Set[str]]:
    """Return the keys of the environments of living attempts.

    None if the environment of an attempt is unknown, for example because it is starting: it may use any environment.

    The keys are read from the attempts' files and not computed, because this agent may have another interpreter than the tasks.
    """
    used = set()
    for workflow in attempts.workflows(root):
        for _, directory in attempts.list_attempts(root, workflow):
            if not orphans.may_live(directory):
                continue
            try:
                with open(os.path.join(directory, attempt_files.LAUNCH), "rb") as file:
                    launch = decode_object(file.read(), max_bytes=MAX_LINE)
                if launch.get("venv"):
                    used.add(os.path.basename(os.path.dirname(launch["env"]["VIRTUAL_ENV"])))
            except (OSError, ValueError, KeyError, TypeError):
                return None
    return used


def _refuse_used(root: str, key: str) -> None:
    used = _used_venvs(root)
    if used is None or key in used:
        raise OpError("conflict", "it is in use, or a task that is about to start may use it")


def remove_venv(root: str, key: str) -> Json:
    """Remove a Python environment. Raises ``conflict`` while it is being built, and while a task uses it or may be about to."""
    directory = dict(venvs.list_venvs(root)).get(key)
    if directory is None:
        return {"freed_bytes": 0}
    lock = open_locked(venvs.lock_of(directory))
    complete = os.path.join(directory, venvs.COMPLETE)
    try:
        if lock is None:
            raise OpError("conflict", "another process is building or removing it: run `distflow node clean` again later")
        _refuse_used(root, key)
        size = _measure(directory)[0]
        with contextlib.suppress(FileNotFoundError):
            os.rename(complete, complete + ".old")  # a partly removed environment must not look complete
        try:
            _refuse_used(root, key)  # again, because until now a task could start to use it
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                os.rename(complete + ".old", complete)
            raise
        _remove_tree(directory)
        _remove_tree(venvs.lock_of(directory))
        return {"freed_bytes": size}
    finally:
        if lock is not None:
            os.close(lock)


def clean(root: str, workflow: str, keep_output: bool) -> Json:
    """Remove a workflow; with ``keep_output``, keep logs and ``_KEPT``. Raises ``conflict`` while an attempt is alive."""
    alive = _alive(root, workflow)
    if alive:
        raise OpError("conflict", "the workflow is still running: {}".format(", ".join(alive)))
    tops = attempts.workflow_directories(root, workflow)
    before = sum(_measure(top)[0] for top in tops)
    for _, directory in attempts.list_attempts(root, workflow):
        attempt_files.remove_secrets(directory)  # needed if runner and keeper were killed while no agent ran
    if keep_output:
        for _, directory in list(attempts.list_attempts(root, workflow)):
            _remove_all_but_output(directory)
        return {"freed_bytes": before - sum(_measure(top)[0] for top in tops)}
    try:
        hidden = _hide(root, workflow)
    except FileNotFoundError:  # another agent has moved it
        return {"freed_bytes": 0}
    trash = os.path.join(root, _TRASH)
    if os.path.isdir(trash):
        for name in os.listdir(trash):  # also leftovers of earlier or interrupted removals
            with contextlib.suppress(OSError):
                _remove_tree(os.path.join(trash, name))
    for path in hidden.values():
        _remove_tree(path)
    return {"freed_bytes": before}


def _hide(root: str, workflow: str) -> Dict[str, str]:
    """Move a workflow's directories, so that a partly removed workflow does not look complete. Returns old path → new path."""
    trash = os.path.join(root, _TRASH)
    hidden = {}
    for number, top in enumerate(attempts.workflow_directories(root, workflow)):
        os.makedirs(trash, mode=0o700, exist_ok=True)
        hidden[top] = os.path.join(trash, "{}-{}-{}".format(workflow, os.getpid(), number))
        os.rename(top, hidden[top])
    return hidden


def _remove_all_but_output(directory: str) -> None:
    """Remove the files of an attempt except its log, its samples and ``_KEPT``."""
    for entry in list(os.scandir(directory)):
        if entry.name in _KEPT or log_files.is_output(entry.name):
            continue
        path = entry.path
        if entry.is_dir(follow_symlinks=False) and not entry.name.startswith(_REMOVED):
            # Rename it first: a new attempt must not take over files from a directory that is being removed
            # (see `placed_trees.take_over`).
            path = os.path.join(directory, "{}{}-{}".format(_REMOVED, os.getpid(), entry.name))
            with contextlib.suppress(FileNotFoundError):  # another agent has moved it
                os.rename(entry.path, path)
        _remove_tree(path)


def _alive(root: str, workflow: str) -> List[str]:
    return [attempt for attempt, directory in attempts.list_attempts(root, workflow) if orphans.may_live(directory)]


def _remove_tree(path: str) -> None:
    """Remove a file or directory, if it exists. The ``OSError`` names the file that cannot be removed."""
    if os.path.islink(path) or not os.path.isdir(path):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        return
    _allow_access(path)
    for folder, names, _ in os.walk(path):
        for name in names:
            _allow_access(os.path.join(folder, name))
    shutil.rmtree(path)


def _allow_access(folder: str) -> None:
    """Restore the owner's access to a directory that a task made read-only, such as a cache of Go modules."""
    if not os.path.islink(folder) and not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
        with contextlib.suppress(OSError):
            os.chmod(folder, 0o700)


def _measure(top: str) -> Tuple[int, float]:
    """Return the bytes on disk of ``top`` and the files below it, and when one of them was last modified (epoch seconds)."""
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


_BLOB_NAME = re.compile(r"\.unmarked|(pack-)?[0-9a-f]{16,64}(\.users)?(\.new|\.([0-9-]+\.)?part)?")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_DIRECTORIES = ("images", _TRASH, "runtime", venvs.VENVS)
_EARLIER = {
    BLOBS: _BLOB_NAME,
    "images": re.compile(r"[0-9a-f]{32}\.sif"),
    _TRASH: re.compile(r"[0-9a-f-]{32,36}-[0-9]+"),
    "runtime": _DIGEST,
}
"""Directory → pattern of the names that an earlier version probably left there.

``_remove_earlier`` first removes the files that distflow certainly created. The others may be the user's, so they are only
reported.
"""
_LOCK_NAME = re.compile(r"(gpu|port)-[0-9]+\.lock|claim-[0-9]+-[0-9]+\.lock|claims\.lock|ticket-[0-9]+-[0-9a-f]{16}\.json")


def uninstall(root: str, request: Json) -> Json:
    """Remove the files that distflow certainly created. Returns the ``removed`` paths, and the ``left`` paths with the cause.

    Raises ``conflict`` while a task is alive or a Python environment is being built.
    """
    alive = [
        name
        for workflow in attempts.workflows(root)
        for name, directory in attempts.list_attempts(root, workflow)
        if orphans.may_live(directory)
    ]
    if alive:
        more = " and {} more".format(len(alive) - 5) if len(alive) > 5 else ""
        where = "this node, or on another node that shares its root directory"
        names = ", ".join(alive[:5]) + more
        raise OpError("conflict", "tasks may be running on {}: {}; cancel their workflows first".format(where, names))
    removed: List[str] = []
    left: List[str] = []
    with _no_builds(root):
        for workflow in attempts.workflows(root):
            for _, directory in attempts.list_attempts(root, workflow):
                attempt_files.remove_secrets(directory)
        lease_dir = os.path.abspath(os.path.expanduser(str(request.get("lease_dir") or "")))
        if request.get("lease_dir") and os.path.isdir(lease_dir):
            _remove_locks(lease_dir, removed, left)
        _remove_root(root, removed, left)
    return {"removed": removed, "left": left}


@contextlib.contextmanager
def _no_builds(root: str) -> Iterator[None]:
    """Hold the locks of all Python environments. Raises ``conflict`` if another process has one."""
    top = os.path.join(root, venvs.VENVS)
    names = os.listdir(top) if root_directory.is_own_directory(top) else []
    with contextlib.ExitStack() as held:
        for name in names:
            if name.endswith(".lock"):
                lock = open_locked(os.path.join(top, name))
                if lock is None:
                    raise OpError("conflict", "a Python environment is being built or removed on this node; try again later")
                held.callback(os.close, lock)
        yield


def _remove_locks(path: str, removed: List[str], left: List[str]) -> None:
    """Remove this user's free lock files, and the directory if it is then empty.

    A process that is just locking a file notices that the file was removed.
    """
    try:
        directory = lease_files.open_directory(path)
    except OpError as error:
        left.append("{}: {}".format(path, error.message))
        return
    try:
        for name in sorted(os.listdir(directory)):
            if not _LOCK_NAME.fullmatch(name) or os.stat(name, dir_fd=directory, follow_symlinks=False).st_uid != os.getuid():
                continue
            fd, holder, reason = lease_files.lock(directory, name, {})
            if fd < 0:
                why = "it is in use by {}".format(holder) if holder else "it cannot be locked: {}".format(reason)
                left.append("{}: {}".format(os.path.join(path, name), why))
                continue
            os.unlink(name, dir_fd=directory)
            os.close(fd)
            removed.append(os.path.join(path, name))
        others = len(os.listdir(directory))
    finally:
        os.close(directory)
    if others:
        left.append("{}: it contains {}: locks in use, files of other users, or other files".format(path, _files(others)))
    elif _try(os.rmdir, path, left):
        removed.append(path)


def _remove_root(root: str, removed: List[str], left: List[str]) -> None:
    """Remove workflows, files of earlier versions, the private directory ``root``, and its parent if that is empty."""

    def remove(workflow: str) -> None:
        with contextlib.suppress(FileNotFoundError):  # another agent has moved it
            for path, hidden in _hide(root, workflow).items():
                _remove_tree(hidden)
                removed.append(path)

    for workflow in attempts.workflows(root):
        _try(remove, workflow, left)
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
            ours = [blob for blob in os.listdir(path) if _BLOB_NAME.fullmatch(blob)]
            for blob in ours:
                _try(os.unlink, os.path.join(path, blob), left)
            remaining = os.listdir(path)
            if not set(remaining) <= set(ours):
                left.append("{}: it contains files that do not belong to distflow".format(path))
            elif not remaining and _try(os.rmdir, path, left):
                removed.append(path)
        elif name in _DIRECTORIES:
            if os.path.lexists(path) and _try(_remove_tree, path, left):
                removed.append(path)
        else:
            left.append("{}: it does not belong to distflow".format(path))
    if set(os.listdir(root)) <= {root_directory.MARKER}:
        _try(os.unlink, os.path.join(root, root_directory.MARKER), left)
        if _try(os.rmdir, root, left):
            removed.append(root)


def _remove_earlier(root: str, earlier: str, removed: List[str], left: List[str]) -> None:
    """Remove files that an earlier version left in the configured directory, if it is certain that distflow created them."""
    certain = {BLOBS: earlier_blobs(root), "runtime": [path for path in _listed(earlier, "runtime") if _is_runtime(path)]}
    for name, paths in certain.items():
        emptied = [path for path in paths if _try(_remove_tree, path, left)]
        folder = os.path.join(earlier, name)
        unmarked = os.path.join(folder, ".unmarked")
        if emptied and os.listdir(folder) == [".unmarked"]:
            _try(os.unlink, unmarked, left)
        if emptied and not os.listdir(folder) and _try(os.rmdir, folder, left):
            removed.append(folder)
    for name, pattern in _EARLIER.items():
        if any(pattern.fullmatch(os.path.basename(path)) for path in _listed(earlier, name)):
            text = "{}: an earlier version of distflow may have created it; check it, and remove it by hand"
            left.append(text.format(os.path.join(earlier, name)))


def _listed(top: str, name: str) -> List[str]:
    """Return the paths in the directory ``name`` of ``top``; empty if this user has no such directory."""
    path = os.path.join(top, name)
    return [os.path.join(path, one) for one in sorted(os.listdir(path))] if root_directory.is_own_directory(path) else []


def _is_runtime(path: str) -> bool:
    """Return whether a directory contains distflow's runtime. Early versions had the agent in ``agent.py``."""
    if not _DIGEST.fullmatch(os.path.basename(path)) or not root_directory.is_own_directory(path):
        return False
    agents = (os.path.join(path, "distflow/runtime", name) for name in ("agent.py", "agent/server.py"))
    return os.listdir(path) == ["distflow"] and any(map(os.path.isfile, agents))


def _files(count: int) -> str:
    return "{} file{}".format(count, "" if count == 1 else "s")


def _try(remove: Callable[[str], object], path: str, left: List[str]) -> bool:
    try:
        remove(path)
    except OSError as error:
        text = "{}: {}".format(error.filename or path, error.strerror)
        if text not in left:
            left.append(text)
        return False
    return True


def list_unknown_workflows(root: str, request: Json) -> Json:
    """Return all workflows except the ``known`` ones: their attempts, and the newest memo that is stored with an attempt."""
    known = set(request.get("known") or [])
    return {"workflows": [_workflow(root, uuid) for uuid in attempts.workflows(root) if uuid not in known]}


def _workflow(root: str, uuid: str) -> Json:
    found = []
    memos: List[Tuple[int, str]] = []
    for name, directory in attempts.list_attempts(root, uuid):
        status = attempts.read_status(directory)
        found.append({
            "attempt": name, "phase": status["phase"], "pid": status["pid"], "started_at": status["started_at"],
            "directory": directory,
        })  # fmt: skip
        path = os.path.join(directory, MEMO)
        try:
            memos.append((os.stat(path).st_mtime_ns, path))
        except OSError:
            continue
    return {"uuid": uuid, "attempts": found, "memo": _newest(memos)}


def _newest(memos: List[Tuple[int, str]]) -> str:
    for _, path in sorted(memos, reverse=True):
        try:
            with open(path, encoding="utf-8") as file:
                return file.read()
        except (OSError, ValueError):
            continue
    return ""
