"""Copies by rsync between this machine and running tasks, once or in the background, over distflow's own connection.

``shell`` is the remote shell that rsync is given, ``daemon`` the process that copies in the background.
"""

from __future__ import annotations

import os
import select
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType

from distflow.client.client import Client, now
from distflow.client.workflows import choose_tasks, find_workflow
from distflow.errors import InputError, NodeError, NotFound, SupervisorError
from distflow.plan.tokens import KNOWN_PLACES
from distflow.state.codec import encode
from distflow.state.directory import StateDirectory
from distflow.state.record import WorkflowRecord
from distflow.state.syncs import Sync, Syncs

__all__ = [
    "DEBOUNCE_S",
    "LOG_BYTES",
    "POLL_S",
    "RECONCILE_S",
    "Sync",
    "Syncs",
    "check_rsync_here",
    "exit_text",
    "list_syncs",
    "local_path",
    "remote_path",
    "rsync_command",
    "rsync_options",
    "rsync_with_task",
    "start_sync",
    "start_sync_to_first_lead",
    "stop_syncs",
]

POLL_S, DEBOUNCE_S, RECONCILE_S, LOG_BYTES = 1.0, 1.0, 60.0, 2 << 20
"""Defaults of a copy in the background: see ``Sync``."""

_READY_S = 30.0
_INSTALL = "install it there, such as with `apt-get install rsync`"
_OUTPUT = "{{output}}"
_PLACES: Mapping[str, str] = MappingProxyType(
    {_OUTPUT: "../output"} | {path: f"../{ours}" for path, ours in KNOWN_PLACES.items()}
)
"""What a remote path may begin with, and where that is from the task's working directory."""
_MEANINGS: Mapping[int, str] = MappingProxyType(
    {
        10: "the connection broke", 11: "a file could not be read or written", 12: "the connection broke",
        20: "it was interrupted", 23: "some files could not be copied", 24: "some files vanished while they were copied",
        30: "nothing came for too long",
    }
)  # fmt: skip


def rsync_options(timeout: int | None, rate_limit: int | None, *, verbose: bool, progress: bool) -> list[str]:
    """Return rsync's options: ``timeout`` in seconds, ``rate_limit`` in bytes a second."""
    options = ["--archive", "--no-owner", "--no-group", "--protect-args", "--partial"]
    if timeout is not None:
        options.append(f"--timeout={timeout}")
    if rate_limit is not None:
        options.append(f"--bwlimit={max(1, rate_limit // 1024)}")
    if verbose:
        options.append("--verbose")
    if progress:
        options.append("--info=progress2")
    return options


def local_path(path: str) -> str:
    """Return a local path that rsync cannot take for one of another machine, and that names contents where it did so."""
    whole = os.path.abspath(path)
    return whole + ("/" if os.path.basename(path) in ("", ".", "..") and whole != "/" else "")


def remote_path(path: str) -> str:
    """Return a remote path as rsync meets it in the task's working directory: its output, and what OSMO's containers have.

    >>> remote_path("{{output}}/logs"), remote_path("/osmo/run/workspace/src/"), remote_path("src"), remote_path("/scratch")
    ('../output/logs', '../work/src/', 'src', '/scratch')
    """
    for theirs, ours in _PLACES.items():
        if path == theirs or path.startswith(f"{theirs}/"):
            return f"{ours}{path.removeprefix(theirs)}"
    return path


def check_rsync_here() -> str:
    """Return where rsync is on this machine. Raises ``InputError``."""
    found = shutil.which("rsync")
    if found is None:
        raise InputError("rsync is not found on this machine", hint=_INSTALL.replace(" there", ""))
    return found


def rsync_command(workflow: str, task: str, connect_timeout: int, words: Sequence[str]) -> list[str]:
    """Return the command that copies to or from a task; ``words``: its options and paths, of which all here are absolute.

    To be run in ``/``, where no file of the person's can be taken for a module of ours. Raises ``InputError``.
    """
    # rsync itself splits what it is to use as its remote shell, with quotes as a shell has them.
    shell = [sys.executable, "-m", "distflow.client.rsync.shell", workflow, task, str(connect_timeout)]
    quoted = " ".join("'{}'".format(word.replace("'", "''")) for word in shell)
    return [check_rsync_here(), "-e", quoted, *words]


def exit_text(code: int) -> str:
    """Return what happened when rsync ended with a code other than 0.

    >>> exit_text(23), exit_text(5)
    ('rsync ended with code 23 (some files could not be copied)', 'rsync ended with code 5')
    """
    return f"rsync ended with code {code}" + (f" ({_MEANINGS[code]})" if code in _MEANINGS else "")


def rsync_with_task(client: Client, workflow: str, task: str | None, connect_timeout: int, words: Sequence[str]) -> None:
    """Run rsync between this machine and a running task; its output goes where that of this process goes.

    Args:
        client: Where the workflow is known.
        workflow: Its id or uuid.
        task: The task; else the lead of the first group.
        connect_timeout: Seconds that the node may take to answer.
        words: rsync's options and paths, of which those of the task begin with ``node:``.

    Raises:
        InputError: when the task does not run, and when this machine has no rsync.
        NodeError: when the node cannot be reached or has no rsync, and when rsync fails.

    """
    check_rsync_here()
    record, name, node = _check_task(client, workflow, task, connect_timeout)
    environment = dict(client.environ) | {"DISTFLOW_STATE": str(client.directory.path)}
    command = rsync_command(record.uuid, name, connect_timeout, words)
    code = subprocess.run(command, check=False, cwd="/", env=environment).returncode
    if code:
        raise NodeError(node, exit_text(code), hint="its own words stand above")


def start_sync(
    client: Client,
    workflow: str,
    task: str | None,
    local: str,
    remote: str,
    *,
    options: Sequence[str],
    connect_timeout: int = 60,
    poll_s: float = POLL_S,
    debounce_s: float = DEBOUNCE_S,
    reconcile_s: float = RECONCILE_S,
    max_log_size: int = LOG_BYTES,
) -> Sync:
    """Copy a local path to a running task in the background, again whenever it changes, until the task has ended.

    The arguments are those of ``rsync_with_task`` and the fields of ``Sync``; so are the errors, and:

    Raises:
        InputError: when files are copied to that task in the background already.
        SupervisorError: when the process that copies does not come up.

    """
    check_rsync_here()
    record, name, _ = _check_task(client, workflow, task, connect_timeout)
    sync = Sync(
        workflow=record.uuid, workflow_id=record.id, task=name, local=local, remote=remote, options=tuple(options),
        connect_timeout_s=connect_timeout, poll_s=poll_s, debounce_s=debounce_s, reconcile_s=reconcile_s,
        max_log_size=max_log_size,
    )  # fmt: skip
    return _start(client.directory, sync)


def start_sync_to_first_lead(client: Client, record: WorkflowRecord, local: str, remote: str) -> Sync:
    """Copy a local path to the lead of a workflow's first group in the background, from when it runs.

    Raises as ``start_sync`` does.
    """
    sync = Sync(
        workflow=record.uuid, workflow_id=record.id, task=_first_lead(record), local=local, remote=remote,
        options=tuple(rsync_options(None, None, verbose=False, progress=False)),
        poll_s=POLL_S, debounce_s=DEBOUNCE_S, reconcile_s=RECONCILE_S, max_log_size=LOG_BYTES,
    )  # fmt: skip
    return _start(client.directory, sync)


def list_syncs(client: Client) -> Syncs:
    """Return the copies in the background, those of the last days that have ended included."""
    return Syncs(client.directory.syncs)


def stop_syncs(client: Client, workflow: str | None = None, task: str | None = None) -> list[Sync]:
    """Stop copies in the background: all, or those to a workflow (id or uuid) and a task; return them.

    Raises ``NotFound`` when a workflow or a task is named and nothing is copied there.
    """
    syncs = list_syncs(client)
    running = [one for one in syncs.list() if syncs.is_running(one)]
    chosen = [one for one in running if workflow in (None, one.workflow_id, one.workflow) and task in (None, one.task)]
    if not chosen and (workflow is not None or task is not None):
        what = " ".join(word for word in (workflow, task) if word is not None)
        raise NotFound(f"nothing copies files to {what} in the background", hint="see: distflow workflow rsync status")
    for one in chosen:
        syncs.stop(one)
    return chosen


def _first_lead(record: WorkflowRecord) -> str:
    """Return the task that is meant when none is named."""
    tasks = record.groups[0].tasks
    return next((one for one in tasks if one.lead), tasks[0]).name


def _check_task(client: Client, workflow: str, task: str | None, connect_timeout: int) -> tuple[WorkflowRecord, str, str]:
    """Return a workflow, one of its tasks and the node where that runs, which has rsync. Raises ``NodeError``."""
    from distflow.client.running_tasks import Exit, running_task  # paramiko comes with the nodes

    record = find_workflow(client, workflow, report_age=False)
    ((group, one),) = choose_tasks(record, [task or _first_lead(record)])
    found = running_task(client, record, group, one, connect_timeout)
    session = found.open(["rsync", "--version"], None, connect_timeout, is_plain=True)
    try:
        session.end_input()
        code = next(event.code for event in session.events() if isinstance(event, Exit))
    finally:
        session.close()
    if code:
        raise NodeError(found.node.name, "rsync is not found in the task's PATH there", hint=_INSTALL)
    return record, one.name, found.node.name


def _start(directory: StateDirectory, wanted: Sync) -> Sync:
    """Start the process that copies to a task, and return its record."""
    syncs = Syncs(directory.syncs)
    syncs.ensure()
    syncs.forget(now())
    log = syncs.log(wanted)
    ready, tell = os.pipe()
    try:
        process = _launch(directory, log, tell)
        assert process.stdin is not None  # noqa: S101  it was asked for
        with suppress(BrokenPipeError), process.stdin as stdin:
            stdin.write(encode(wanted))
        readable, _, _ = select.select([ready], [], [], _READY_S)
        answer = os.read(ready, 64) if readable else b""
    finally:
        os.close(ready)
    # It outlives this process, and is then reaped by init.
    process.returncode = 0
    if answer == b"other":
        hint = f"end that one first: distflow workflow rsync stop {wanted.workflow_id} --task {wanted.task}"
        raise InputError(f"files are copied to {wanted.task} of {wanted.workflow_id} already", hint=hint)
    if answer != b"ready":
        raise SupervisorError("the process that is to copy files did not start", hint=f"its log: {log}")
    return next(one for one in syncs.list() if (one.workflow, one.task) == (wanted.workflow, wanted.task))


def _launch(directory: StateDirectory, log: Path, tell: int) -> subprocess.Popen[bytes]:
    try:
        with open(log, "ab", opener=lambda path, flags: os.open(path, flags, 0o600)) as out:
            return subprocess.Popen(
                [sys.executable, "-m", "distflow.client.rsync.daemon", str(directory.path), str(tell)],
                stdin=subprocess.PIPE, stdout=out, stderr=out, pass_fds=(tell,), start_new_session=True, cwd="/",
            )  # fmt: skip
    finally:
        os.close(tell)
