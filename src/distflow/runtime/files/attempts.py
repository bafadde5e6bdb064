"""Directories of attempts: their names, their creation at ``lease``, and the status in their files."""

from __future__ import annotations

import contextlib
import fcntl
import os

from distflow.protocol.light_typing import Callable, Iterator, List, Optional, Tuple
from distflow.protocol.names import is_attempt_name, is_uuid
from distflow.runtime.clock import now
from distflow.runtime.files import attempt_files, log_files, records, root_directory
from distflow.runtime.files.safe_files import has_name
from distflow.runtime.guard import control, runner
from distflow.runtime.guard.control import AttemptHandles
from distflow.runtime.leases import gpu_users, node_leases
from distflow.runtime.probes.facts import user_name
from distflow.runtime.wire import Json, OpError

__all__ = [
    "TaskIsLocked",
    "create",
    "directory_of",
    "is_reachable",
    "list_attempts",
    "lock_files",
    "lock_task",
    "read_status",
    "remove",
    "workflow_directories",
    "workflows",
    "write_ticket",
]

_TRIES = 100


class TaskIsLocked(OpError):
    """Another process is changing the task, or its runner and keeper do not respond: try again."""

    def __init__(self, message: str) -> None:
        super().__init__("busy", message)


def directory_of(root: str, attempt: object) -> str:
    """Return the attempt's directory. Raises ``bad_request`` for a malformed name."""
    if not isinstance(attempt, str) or not is_attempt_name(attempt):
        raise OpError("bad_request", "{!r} is not the name of an attempt: `<workflow uuid>/<group>/<task>/<n>`".format(attempt))
    parts = attempt.split("/")
    current = os.path.join(root, *parts)
    earlier = root_directory.earlier_root(root)
    if earlier is not None and not os.path.isdir(current):
        old = os.path.join(earlier, *parts)
        if os.path.join(earlier, parts[0]) in workflow_directories(root, parts[0]) and _is_recorded("/".join(parts), old):
            return old
    return current


def workflows(root: str) -> List[str]:
    """Return the uuids of all workflows with a directory in ``workflow_directories``."""
    found = (name for one in root_directory.roots(root) if os.path.isdir(one) for name in os.listdir(one) if is_uuid(name))
    return sorted(name for name in set(found) if workflow_directories(root, name))


def workflow_directories(root: str, workflow: str) -> List[str]:
    """Return a workflow's directories: in the private directory, and in the directory that earlier versions used.

    A record proves that distflow created them; in the private directory, a marker does so, too. Directories without a proof
    are left out and must not be removed. Raises ``bad_request`` for a malformed uuid.
    """
    if not is_uuid(workflow):
        raise OpError("bad_request", "{!r} is not the uuid of a workflow".format(workflow))
    current, earlier = os.path.join(root, workflow), root_directory.earlier_root(root)
    found = []
    if root_directory.is_own_directory(current) and (root_directory.is_marked(current) or _has_record(current)):
        found.append(current)
    old = os.path.join(earlier or root, workflow)
    # Earlier versions set no markers, so a directory with a marker is a copy that the user made.
    if earlier is not None and root_directory.is_own_directory(old) and not root_directory.is_marked(old) and _has_record(old):
        found.append(old)
    return found


def _has_record(path: str) -> bool:
    return any(_is_recorded(name, directory) for name, directory in _attempts_below(path))


def _is_recorded(attempt: str, directory: str) -> bool:
    """Return whether the records in ``directory`` can belong to an attempt of this name."""
    state = records.read_state(directory)
    if state is not None:
        return state.get("attempt") == attempt
    # In earlier versions, `clean` could leave only the record of the end, which does not name the attempt.
    end = records.read_end(directory) or {}
    return {"reason", "ended_at", "output_bytes", "lost_output_bytes"} <= set(end)


def list_attempts(root: str, workflow: str) -> Iterator[Tuple[str, str]]:
    """Yield the name and the directory of every attempt of a workflow."""
    for top in workflow_directories(root, workflow):
        yield from _attempts_below(top)


def _attempts_below(top: str) -> Iterator[Tuple[str, str]]:
    def names(path: str) -> List[str]:
        try:
            return sorted(entry.name for entry in os.scandir(path) if entry.is_dir(follow_symlinks=False))
        except OSError:
            return []

    workflow = os.path.basename(top)
    for group in names(top):
        for task in names(os.path.join(top, group)):
            for number in names(os.path.join(top, group, task)):
                yield "{}/{}/{}/{}".format(workflow, group, task, number), os.path.join(top, group, task, number)


def read_status(directory: str) -> Json:
    """Return the attempt's status, read from its files."""
    end = records.read_end(directory)
    state = records.read_state(directory) or {}
    phase = "ended" if end is not None else state.get("phase", "absent")
    command = state.get("command") or {}
    status = {
        "phase": phase, "pid": command.get("pid"), "started_at": (end or state).get("started_at"), "end": end,
        "directory": directory,
    }  # fmt: skip
    if end is None and state.get("lost_output_bytes"):
        status["loses_output"] = True
    if end is not None:
        status["has_files"] = _has_files(directory)
    return status


def _has_files(directory: str) -> Optional[bool]:
    """Return whether the task's output directory contains anything; None if it cannot be read."""
    try:
        with os.scandir(os.path.join(directory, "output")) as entries:
            return any(True for _ in entries)
    except OSError:
        return None


def is_reachable(directory: str) -> bool:
    """Return whether the attempt's runner or keeper has the socket ``control`` open. It may not answer."""
    try:
        control.connect(directory).close()
    except BlockingIOError:
        return True  # the queue of connections is full, so a process is listening
    except OSError:
        return False
    return True


def lock_task(directory: str, *, wait: bool) -> int:
    """Lock the task, so that no other agent creates its attempts or records their ends. Closing the descriptor unlocks it.

    Without ``wait``, raises ``TaskIsLocked`` if another process has locked the task. Raises ``FileNotFoundError`` if the task
    has no directory.
    """
    return _lock(os.path.dirname(directory), 0 if wait else fcntl.LOCK_NB)


def lock_files(directory: str) -> int:
    """Lock the attempt, so that no other agent places its files. Closing the descriptor unlocks it. Raises ``TaskIsLocked``."""
    return _lock(directory, fcntl.LOCK_NB)


def _lock(path: str, flags: int) -> int:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | flags)
    except BlockingIOError:
        os.close(fd)
        raise TaskIsLocked("another connection is changing an attempt of this task") from None
    return fd


def remove(directory: str) -> None:
    """Remove the attempt's directory, and its parents if they become empty."""
    import shutil

    attempt_files.remove_secrets(directory)
    shutil.rmtree(directory, ignore_errors=True)
    if os.path.isdir(directory):
        shutil.rmtree(directory)  # try again, and raise the error this time
    task = os.path.dirname(directory)
    group = os.path.dirname(task)
    workflow = os.path.dirname(group)
    try:
        lock = lock_task(directory, wait=False)
    except (TaskIsLocked, OSError):
        return  # another agent is creating an attempt of this task, or the task's directory is gone
    try:
        os.rmdir(task)
        os.rmdir(group)
        _remove_workflow(workflow)
    except OSError:
        return
    finally:
        os.close(lock)


def _remove_workflow(directory: str) -> None:
    """Remove a workflow's directory when only its marker is left in it."""
    if os.listdir(directory) not in ([], [root_directory.MARKER]):
        return
    with contextlib.suppress(FileNotFoundError):
        os.unlink(os.path.join(directory, root_directory.MARKER))
    try:
        os.rmdir(directory)
    except FileNotFoundError:
        return
    except OSError:
        root_directory.mark(directory)  # another attempt has just been leased


def _make_task(directory: str) -> int:
    """Create the task's directory and lock it (``lock_task``), because releasing another lease removes empty directories."""
    parent = os.path.dirname(directory)
    for number in range(_TRIES):
        try:
            os.makedirs(parent, mode=0o700, exist_ok=True)
            root_directory.mark(os.path.dirname(os.path.dirname(parent)))
            lock = lock_task(directory, wait=False)
        except (FileNotFoundError, FileExistsError):
            if number + 1 == _TRIES:
                raise
            continue
        if has_name(lock, parent):
            return lock
        os.close(lock)
    raise TaskIsLocked("other processes repeatedly removed the directory of this task")


def create(root: str, request: Json, umask: int) -> int:
    """Create the attempt of a ``lease`` request, and fork its runner and keeper. Returns the runner's id.

    On an error, the new directory is removed.
    """
    attempt = request["attempt"]
    directory = directory_of(root, attempt)
    try:
        task = _make_task(directory)
        try:
            if os.path.isdir(directory):
                if is_reachable(directory):
                    raise TaskIsLocked("another connection has just leased this attempt")
                remove(directory)  # an agent was killed before the pair started
            return _create(directory, attempt, request, umask)
        finally:
            os.close(task)
    except OSError as error:
        failed = OpError.from_os(error, "cannot create the attempt in `{}`".format(directory))
        hints = {
            "no_space": "; free disk space there, or set another `root` for the node",
            "permission": "; set another `root` for the node",
        }
        raise OpError(failed.kind, failed.message + hints.get(failed.kind, "")) from error


def _holder_of(attempt: str, request: Json) -> Json:
    """Return the attempt's description for lock files and tickets. ``label`` is the attempt's name for people."""
    label = str(request.get("label") or "")[:200]
    workflow = attempt.split("/", 1)[0]
    return {
        "workflow": workflow, "attempt": attempt, "user": user_name(), "pid": os.getpid(), "since": now(), "label": label,
    }  # fmt: skip


def write_ticket(attempt: str, waits: Json) -> None:
    """Write a ticket for a lease that is released because its gang waits for another node.

    ``waits`` has the resources that the task still needs on this node. If it has none, no ticket is written.
    """
    amounts = {name: int(waits.get(name) or 0) for name in ("gpus", "cpus", "memory")}
    if any(amounts.values()):
        with contextlib.suppress(OpError):  # the next lease reports errors of the directory
            node_leases.write_ticket(str(waits["lease_dir"]), _holder_of(attempt, waits), amounts)


def _create(directory: str, attempt: str, request: Json, umask: int) -> int:
    holder = _holder_of(attempt, request)
    gpu_ids = [int(gpu) for gpu in request.get("gpu_ids") or []]
    wanted = {name: (int(pair[0]), int(pair[1])) for name, pair in (request.get("wanted") or {}).items()}
    held = node_leases.take(
        str(request.get("lease_dir") or ""), int(request.get("gpus") or 0), gpu_ids, request.get("port"), holder, wanted,
        request.get("users") or [],
    )  # fmt: skip
    opened: List[int] = []

    def keep(fd: int) -> int:
        opened.append(fd)
        return fd

    try:
        os.mkdir(directory, 0o700)
        for name in ("work", "output", "files"):
            os.mkdir(os.path.join(directory, name), 0o700)
        dir_fd = keep(os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
        link, link_port = _listen_for_gang(str(request["link"])) if request.get("link") else (-1, None)
        if link >= 0:
            keep(link)
        append: Callable[[str], int] = lambda name: keep(_append_to(dir_fd, name))  # noqa: E731
        handles = AttemptHandles(
            attempt=attempt,
            directory=directory,
            dir_fd=dir_fd,
            log=append(log_files.LOG),
            output_index=append(log_files.INDEX),
            errors=append("pair.log"),
            record=keep(records.allocate(dir_fd, records.SPARE_END, records.END_BYTES)),
            state=keep(records.allocate(dir_fd, records.STATE, records.STATE_BYTES)),
            listener=keep(control.listen(dir_fd)),
            locks=held.locks,
            port_sockets=held.port_sockets,
            umask=umask,
            gpu_ids=held.gpu_ids,
            other_gpus=gpu_users.addresses_of_others(request.get("gpu_addresses") or {}, held.gpu_ids),
            port=held.port,
            link=link,
            link_port=link_port,
            start_timeout_s=float(request.get("start_timeout_s") or 300.0),
            holder=holder,
        )
        return runner.fork_pair(handles)
    except BaseException:
        import shutil

        shutil.rmtree(directory, ignore_errors=True)
        raise
    finally:
        held.close()
        for fd in opened:
            os.close(fd)


def _listen_for_gang(address: str) -> Tuple[int, int]:
    from distflow.runtime.probes.reachability import listen_on

    listener, _ = listen_on(address)
    port = int(listener.getsockname()[1])
    return listener.detach(), port


def _append_to(dir_fd: int, name: str) -> int:
    return os.open(name, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600, dir_fd=dir_fd)
