"""Processes that copy to tasks in the background, as commands start, show and end them."""

from __future__ import annotations

import os
import select
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from distflow.cli.tables import plain, table
from distflow.cli.times import iso, local_second
from distflow.errors import InputError, SupervisorError
from distflow.state.codec import encode
from distflow.state.directory import StateDirectory
from distflow.state.syncs import Sync, Syncs
from distflow.supervisor.clock import SystemClock

__all__ = ["start_sync", "syncs_json", "syncs_text"]

_READY_S = 30.0


def start_sync(directory: StateDirectory, wanted: Sync) -> Sync:
    """Start the process that copies to a task, and return its record.

    Raises ``InputError`` when one copies to that task already, and ``SupervisorError`` when it does not come up.
    """
    syncs = Syncs(directory.syncs)
    syncs.ensure()
    syncs.forget(SystemClock().now())
    log = syncs.log(wanted)
    ready, tell = os.pipe()
    try:
        process = _launch(directory, log, tell)
        assert process.stdin is not None  # noqa: S101  it was asked for
        with suppress(BrokenPipeError), process.stdin as stdin:
            stdin.write(encode(wanted))
        readable, _, _ = select.select([ready], [], [], _READY_S)
        said = os.read(ready, 64) if readable else b""
    finally:
        os.close(ready)
    # It outlives this process, and is then reaped by init.
    process.returncode = 0
    if said == b"other":
        hint = f"end that one first: distflow workflow rsync stop {wanted.workflow_id} --task {wanted.task}"
        raise InputError(f"files are copied to {wanted.task} of {wanted.workflow_id} already", hint=hint)
    if said != b"ready":
        raise SupervisorError("the process that is to copy files did not start", hint=f"its log: {log}")
    return next(one for one in syncs.list() if (one.workflow, one.task) == (wanted.workflow, wanted.task))


def _launch(directory: StateDirectory, log: Path, tell: int) -> subprocess.Popen[bytes]:
    try:
        with open(log, "ab", opener=lambda path, flags: os.open(path, flags, 0o600)) as out:
            return subprocess.Popen(
                [sys.executable, "-m", "distflow.cli.rsyncdaemon", str(directory.path), str(tell)],
                stdin=subprocess.PIPE, stdout=out, stderr=out, pass_fds=(tell,), start_new_session=True, cwd="/",
            )  # fmt: skip
    finally:
        os.close(tell)


def syncs_text(syncs: Syncs, found: Sequence[Sync]) -> str:
    """Return a table of them, and below it why the last copy of some did not end well."""
    header = ("Workflow ID", "Task Name", "PID", "Status", "Last Synced", "Local Path", "Remote Path", "Log File")
    rows = [
        (
            one.workflow_id, one.task, str(one.pid), _status(syncs, one),
            local_second(one.synced_at) if one.synced_at is not None else "", plain(one.local), plain(one.remote),
            str(syncs.log(one)),
        )
        for one in found
    ]  # fmt: skip
    errors = [f"{one.workflow_id} {one.task}: the last copy failed: {plain(one.error)}\n" for one in found if one.error]
    return table(header, rows) + "".join(errors)


def syncs_json(syncs: Syncs, found: Sequence[Sync]) -> dict[str, object]:
    """Return them as ``--format-type json`` prints them."""
    return {
        "daemons": [
            {
                "workflow_id": one.workflow_id, "workflow_uuid": one.workflow, "task_name": one.task, "pid": one.pid,
                "status": _status(syncs, one), "last_synced": iso(one.synced_at), "local_path": one.local,
                "remote_path": one.remote, "log_file": str(syncs.log(one)), "error": one.error or None,
            }
            for one in found
        ]
    }  # fmt: skip


def _status(syncs: Syncs, sync: Sync) -> str:
    return "RUNNING" if syncs.is_running(sync) else "STOPPED"
