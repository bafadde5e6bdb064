"""The background process that copies files to a task: ``python -m distflow.client.rsync.daemon STATE HANDLE``.

It reads a ``Sync`` from standard input. It writes ``ready`` to the pipe with the descriptor HANDLE, or ``other`` if another
process already copies to the task. It waits until the task is running, copies to each of its attempts, and exits when the group
of the task has ended.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from distflow.client.client import now
from distflow.client.rsync.copies import exit_text, rsync_command
from distflow.documents.quantities import local_second
from distflow.errors import DistflowError, StateError
from distflow.lifecycle.states import State
from distflow.state.codec import decode
from distflow.state.directory import StateDirectory, state_errors
from distflow.state.record import GroupRecord, TaskRecord
from distflow.state.store import Store
from distflow.state.syncs import Sync, Syncs
from distflow.structs import replace

__all__ = ["CopySchedule", "Daemon", "Snapshot", "main", "take_snapshot"]


_RECORD_POLL_S = 2.0
"""The maximum pause between two reads of the task's record, in seconds. A copy can take longer."""
_VANISHED = 24
"""rsync's exit code if files were deleted during the copy. The next scan detects the deletion."""


Snapshot = Mapping[str, tuple[int, int, int]]
"""The modification time (ns), size (bytes) and mode of each path."""


def take_snapshot(path: str) -> Snapshot:
    """Return a snapshot of a file, or of a directory and everything below it.

    Links below the directory are not followed. Files that disappear during the scan are left out.
    """
    found: dict[str, tuple[int, int, int]] = {}
    _add_status(path, found)
    for folder, folders, files in os.walk(path):
        for name in (*folders, *files):
            _add_status(os.path.join(folder, name), found)
    return found


def _add_status(path: str, found: dict[str, tuple[int, int, int]]) -> None:
    try:
        status = os.lstat(path)
    except OSError:
        return
    # The modification time of a directory changes when an entry is added or removed.
    found[path] = (status.st_mtime_ns, status.st_size, status.st_mode)


class CopySchedule:
    """Decides when to copy: once at the start, after changes have settled, and at regular intervals. Times are in seconds."""

    def __init__(self, debounce_s: float, reconcile_s: float) -> None:
        """Start without a snapshot and without a copy.

        Args:
            debounce_s: The time without further changes before a change is copied.
            reconcile_s: The interval after which files are copied even without a detected change.

        """
        self._debounce_s = debounce_s
        self._reconcile_s = reconcile_s
        self._seen: Snapshot | None = None
        self._changed_at: float | None = None
        self._copied_at: float | None = None

    def add_snapshot(self, snapshot: Snapshot, now: float) -> None:
        """Record a change if the new snapshot differs from the previous one."""
        if self._seen is not None and snapshot != self._seen:
            self._changed_at = now
        self._seen = snapshot

    def is_due(self, now: float) -> bool:
        """Return whether to copy now."""
        if self._copied_at is None or now - self._copied_at >= self._reconcile_s:
            return True
        return self._changed_at is not None and now - self._changed_at >= self._debounce_s

    def record_copy(self, now: float) -> None:
        """Record the start of a copy. A failed copy is repeated at the next interval or change."""
        self._copied_at = now
        self._changed_at = None

    def forget_copies(self) -> None:
        """Make a copy due at once, because a new attempt has a new directory, without the copied files."""
        self._copied_at = None


def main(arguments: Sequence[str]) -> int:
    """Copy until the group of the task has ended, SIGTERM arrives or an error occurs, and return the exit code."""
    try:
        return _copy_until_end(StateDirectory(Path(arguments[0])), int(arguments[1]))
    except StateError as error:
        sys.stderr.write(f"error: {error}\n")  # standard error is the log of the copy
        return error.exit_code


def _copy_until_end(directory: StateDirectory, answer_to: int) -> int:
    wanted = decode(sys.stdin.buffer.read(), Sync)
    syncs = Syncs(directory.syncs)
    if syncs.take(wanted) is None:
        os.write(answer_to, b"other")
        return 1
    signal.signal(signal.SIGTERM, _stopped)
    daemon = Daemon(directory, syncs, replace(wanted, pid=os.getpid()))
    os.write(answer_to, b"ready")
    os.close(answer_to)
    try:
        why = daemon.work()
    except _Stopped:
        why = "stopped on request"
    except DistflowError as error:
        why = str(error)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    daemon.end(why)
    return 0


class _Stopped(BaseException):
    """The process received SIGTERM."""


def _stopped(*_: object) -> NoReturn:
    raise _Stopped


class Daemon:
    """Watches and copies the files of one ``Sync``, and writes its record and its log."""

    def __init__(self, directory: StateDirectory, syncs: Syncs, sync: Sync) -> None:
        """Write the first record. This process must hold the task's lock (``Syncs.take``)."""
        self._directory = directory
        self._syncs = syncs
        self._sync = sync
        self._schedule = CopySchedule(sync.debounce_s, sync.reconcile_s)
        syncs.write(sync)
        self._log(f"copying {sync.local} to {sync.remote} of {sync.workflow_id} {sync.task} (pid {sync.pid})")

    def work(self) -> str:
        """Watch and copy until the group has ended, and return the reason for the end."""
        attempt, next_look, pause = -1, 0.0, threading.Event()
        while True:
            (group, task), at = self._look_up(), now()
            if group.state.is_final:  # until then, an ended task may get another attempt
                return f"{self._sync.task} has ended: {(task or group).status}"
            if task is not None and task.state is State.RUNNING:
                if task.attempt != attempt:
                    attempt, next_look = task.attempt, at
                    self._schedule.forget_copies()
                if at >= next_look:
                    self._schedule.add_snapshot(take_snapshot(self._sync.local), at)
                    next_look = at + self._sync.poll_s
                    if self._schedule.is_due(at):
                        self._schedule.record_copy(at)
                        self._copy()
            pause.wait(min(self._sync.poll_s, _RECORD_POLL_S))

    def end(self, why: str) -> None:
        """Record the end and its reason."""
        self._log(f"exiting: {why}")
        self._sync = replace(self._sync, ended_at=now())
        self._syncs.write(self._sync)

    def _look_up(self) -> tuple[GroupRecord, TaskRecord | None]:
        """Return the group and the task; ``None`` for the task if the current attempt of an elastic group runs without it."""
        with Store(self._directory.store) as store:
            record = store.find(self._sync.workflow)
        name = self._sync.task
        tasks = ((group, task) for group in record.groups for task in group.tasks if task.name == name)
        return next(tasks, None) or (next(group for group in record.groups if name in group.left_out), None)

    def _copy(self) -> None:
        sync = self._sync
        arguments = [*sync.options, "--", sync.local, f"node:{sync.remote}"]
        command = rsync_command(sync.workflow, sync.task, sync.connect_timeout_s, arguments)
        environment = os.environ | {"DISTFLOW_STATE": str(self._directory.path)}
        last = ""
        with subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, cwd="/", env=environment,
            text=True, errors="replace",
        ) as process:  # fmt: skip
            try:
                for line in process.stdout or ():
                    last = line.rstrip() or last
                    self._log(line.rstrip())
            except BaseException:
                process.terminate()
                raise
        code = process.returncode
        if code in (0, _VANISHED):
            self._log("copied")
            self._sync = replace(sync, synced_at=now(), error="")
        else:
            self._log(exit_text(code))
            self._sync = replace(sync, error=f"{exit_text(code)}: {last}" if last else exit_text(code))
        self._syncs.write(self._sync)

    def _log(self, text: str) -> None:
        path = self._syncs.log(self._sync)
        with state_errors(path):
            if path.exists() and path.stat().st_size >= self._sync.max_log_size:
                os.replace(path, path.with_suffix(".log.1"))
            with open(path, "a", encoding="utf-8", opener=lambda name, flags: os.open(name, flags, 0o600)) as log:
                log.write(f"{local_second(now())} {text}\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
