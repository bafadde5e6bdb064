"""Copy files between this machine and running tasks with rsync, once or in the background, over distflow's own connection.

The module ``shell`` is the remote shell for rsync. The module ``daemon`` is the background process.
"""

from __future__ import annotations

import contextlib
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
from distflow.state.directory import StateDirectory, state_errors
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
    "local_path",
    "remote_path",
    "rsync_command",
    "rsync_options",
    "rsync_with_task",
    "start_sync",
    "start_sync_to_first_lead",
    "stop_syncs",
    "syncs_of",
]

POLL_S, DEBOUNCE_S, RECONCILE_S, LOG_BYTES = 1.0, 1.0, 60.0, 2 << 20
"""Defaults of a background copy. See ``Sync``."""

_READY_S = 30.0
_INSTALL = "for example with `apt-get install rsync`"
_OUTPUT = "{{output}}"
_PLACES: Mapping[str, str] = MappingProxyType(
    {_OUTPUT: "../output"} | {path: f"../{ours}" for path, ours in KNOWN_PLACES.items()}
)
"""Prefixes of remote paths, and their locations relative to the task's working directory."""
_MEANINGS: Mapping[int, str] = MappingProxyType(
    {
        10: "the connection broke", 11: "a file could not be read or written", 12: "the connection broke",
        20: "it was interrupted", 23: "some files could not be copied", 24: "some files vanished during the copy",
        30: "timeout without any data",
    }
)  # fmt: skip


def rsync_options(timeout: int | None, rate_limit: int | None, *, verbose: bool, progress: bool) -> list[str]:
    """Return command-line options for rsync. ``timeout`` is in seconds, ``rate_limit`` in bytes per second."""
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
    """Return an absolute path, which rsync cannot mistake for a remote one.

    A path that means the contents of a directory (``dir/``, ``.``, ``..``) keeps that meaning by a slash at its end.
    """
    absolute = os.path.abspath(path)
    return absolute + ("/" if os.path.basename(path) in ("", ".", "..") and absolute != "/" else "")


def remote_path(path: str) -> str:
    """Return a remote path for rsync, which runs in the task's working directory.

    ``{{output}}`` and the directories of OSMO's and Valohai's containers (``KNOWN_PLACES``) are replaced by the task's own.

    >>> remote_path("{{output}}/logs"), remote_path("/osmo/run/workspace/src/"), remote_path("src"), remote_path("/scratch")
    ('../output/logs', '../work/src/', 'src', '/scratch')
    """
    for theirs, ours in _PLACES.items():
        if path == theirs or path.startswith(f"{theirs}/"):
            return f"{ours}{path.removeprefix(theirs)}"
    return path


def check_rsync_here() -> str:
    """Return the path of rsync on this machine. Raises ``InputError`` if it is not installed."""
    found = shutil.which("rsync")
    if found is None:
        raise InputError("rsync is not installed on this machine", hint=f"install it, {_INSTALL}")
    return found


def rsync_command(workflow: str, task: str, connect_timeout: int, words: Sequence[str]) -> list[str]:
    """Return the command that copies to or from a task. Run it in ``/``, so that Python does not import files of the user.

    Args:
        workflow: The uuid of the workflow.
        task: The name of the task.
        connect_timeout: The maximum time for the node to answer, in seconds.
        words: rsync's options and paths. Local paths must be absolute.

    Raises:
        InputError: if rsync is not installed on this machine.

    """
    # rsync splits the command of the remote shell at spaces. Unlike in a shell, a doubled quote in a quoted word is one quote.
    shell = [sys.executable, "-m", "distflow.client.rsync.shell", workflow, task, str(connect_timeout)]
    quoted = " ".join("'{}'".format(word.replace("'", "''")) for word in shell)
    return [check_rsync_here(), "-e", quoted, *words]


def exit_text(code: int) -> str:
    """Return a message for a nonzero exit code of rsync.

    >>> exit_text(23), exit_text(5)
    ('rsync ended with code 23 (some files could not be copied)', 'rsync ended with code 5')
    """
    return f"rsync ended with code {code}" + (f" ({_MEANINGS[code]})" if code in _MEANINGS else "")


def rsync_with_task(client: Client, workflow: str, task: str | None, connect_timeout: int, words: Sequence[str]) -> None:
    """Run rsync between this machine and a running task. rsync inherits the output of this process.

    Args:
        client: The client whose store has the workflow.
        workflow: The id or uuid of the workflow, or its name for the latest run.
        task: The name of the task. Default: the lead task of the first group.
        connect_timeout: The maximum time for the node to answer, in seconds.
        words: rsync's options and paths. Local paths must be absolute. Paths of the task begin with ``node:``.

    Raises:
        InputError: if the task is not running, or if rsync is not installed on this machine.
        NodeError: if the node is unreachable or has no rsync, or if rsync fails.
        NotFound: if the workflow or the task does not exist.

    """
    check_rsync_here()
    record, name, node = _check_task(client, workflow, task, connect_timeout)
    environment = dict(client.environ) | {"DISTFLOW_STATE": str(client.directory.path)}
    command = rsync_command(record.uuid, name, connect_timeout, words)
    code = subprocess.run(command, check=False, cwd="/", env=environment).returncode
    if code:
        raise NodeError(node, exit_text(code), hint="see the messages of rsync above")


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
    """Start a background process that copies a local path to a running task after every change, until the task's group ends.

    Args:
        client: The client whose store has the workflow.
        workflow: The id or uuid of the workflow, or its name for the latest run.
        task: The name of the task. Default: the lead task of the first group.
        local: The local file or directory, as an absolute path (see ``local_path``).
        remote: The path on the node (see ``remote_path``).
        options: Command-line options for rsync (see ``rsync_options``).
        connect_timeout: The maximum time for the node to answer, in seconds.
        poll_s: The interval between two scans of the local files, in seconds.
        debounce_s: The time without further changes before a change is copied, in seconds.
        reconcile_s: The interval after which files are copied even without a detected change, in seconds.
        max_log_size: The size at which the log is rotated, in bytes.

    Returns:
        The record of the background copy.

    Raises:
        InputError: if the task is not running, if rsync is not installed on this machine, or if a background copy to this task
            is already running.
        NodeError: if the node is unreachable or has no rsync.
        NotFound: if the workflow or the task does not exist.
        SupervisorError: if the background process does not start.

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
    """Start a background copy to the lead task of a workflow's first group, which may not be running yet.

    The background process waits until the task is running. This function does not.

    Args:
        client: The client whose store has the workflow.
        record: The workflow.
        local: The local file or directory, as an absolute path (see ``local_path``).
        remote: The path on the node (see ``remote_path``).

    Raises:
        InputError: if a background copy to this task is already running.
        SupervisorError: if the background process does not start.

    """
    sync = Sync(
        workflow=record.uuid, workflow_id=record.id, task=_first_lead(record), local=local, remote=remote,
        options=tuple(rsync_options(None, None, verbose=False, progress=False)),
        poll_s=POLL_S, debounce_s=DEBOUNCE_S, reconcile_s=RECONCILE_S, max_log_size=LOG_BYTES,
    )  # fmt: skip
    return _start(client.directory, sync)


def syncs_of(client: Client) -> Syncs:
    """Return the records of background copies. Each new copy removes the records of copies that ended over 14 days ago."""
    return Syncs(client.directory.syncs)


def stop_syncs(client: Client, workflow: str | None = None, task: str | None = None) -> list[Sync]:
    """Stop background copies.

    Args:
        client: The client whose state directory has the records of the copies.
        workflow: Stop only copies to this workflow: its id, uuid or name (for the latest workflow of this name), or ``-`` for
            the latest workflow. Default: all copies.
        task: Stop only copies to tasks of this name. Default: all tasks.

    Returns:
        The stopped copies.

    Raises:
        NotFound: if a workflow or a task is given and no running copy matches.

    """
    syncs = syncs_of(client)
    running = [one for one in syncs.list() if syncs.is_running(one)]
    wanted = shown = workflow
    if workflow is not None and all(workflow not in (one.workflow_id, one.workflow) for one in running):
        with contextlib.suppress(NotFound):  # copies of a workflow that the store no longer has can be stopped, too
            record = client.store.find(workflow)
            wanted, shown = record.uuid, record.id
    chosen = [one for one in running if wanted in (None, one.workflow_id, one.workflow) and task in (None, one.task)]
    if not chosen and (workflow is not None or task is not None):
        what = " of ".join(word for word in (task, shown) if word is not None)
        raise NotFound(
            f"no background copy to {what} is running", hint="`distflow workflow rsync status` lists all background copies"
        )
    for one in chosen:
        syncs.stop(one)
    return chosen


def _first_lead(record: WorkflowRecord) -> str:
    """Return the name of the default task: the lead of the first group."""
    tasks = record.groups[0].tasks
    return next((one for one in tasks if one.lead), tasks[0]).name


def _check_task(client: Client, workflow: str, task: str | None, connect_timeout: int) -> tuple[WorkflowRecord, str, str]:
    """Check that a task is running and that its node has rsync. Return the workflow, the task's name and the node's name."""
    from distflow.client.running_tasks import Exit, running_task  # other functions do not need it

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
        raise NodeError(
            found.node.name,
            "rsync is not in the node's PATH (rsync runs outside the task's container and without `setup`)",
            hint=f"install it on the node, {_INSTALL}",
        )
    return record, one.name, found.node.name


def _start(directory: StateDirectory, wanted: Sync) -> Sync:
    """Start the background process for a copy, and return the record that it has written."""
    syncs = Syncs(directory.syncs)
    syncs.ensure()
    syncs.forget(now())
    log = syncs.log(wanted)
    ready, answer_to = os.pipe()
    try:
        process = _launch(directory, log, answer_to)
        assert process.stdin is not None  # noqa: S101  Popen was called with stdin=PIPE
        with suppress(BrokenPipeError), process.stdin as stdin:
            stdin.write(encode(wanted))
        readable, _, _ = select.select([ready], [], [], _READY_S)
        answer = os.read(ready, 64) if readable else b""
    finally:
        os.close(ready)
    # The process outlives this one, and init reaps it. Without a return code, Python would issue a ResourceWarning.
    process.returncode = 0
    if answer == b"other":
        hint = f"stop it first: distflow workflow rsync stop {wanted.workflow_id} --task {wanted.task}"
        raise InputError(f"a background copy to `{wanted.workflow_id}/{wanted.task}` is already running", hint=hint)
    if answer != b"ready":
        raise SupervisorError("the background copy did not start", hint=f"its log: {log}")
    return next(one for one in syncs.list() if (one.workflow, one.task) == (wanted.workflow, wanted.task))


def _launch(directory: StateDirectory, log: Path, answer_to: int) -> subprocess.Popen[bytes]:
    try:
        with state_errors(log):
            out = open(log, "ab", opener=lambda path, flags: os.open(path, flags, 0o600))
        with out:
            return subprocess.Popen(
                [sys.executable, "-m", "distflow.client.rsync.daemon", str(directory.path), str(answer_to)],
                stdin=subprocess.PIPE, stdout=out, stderr=out, pass_fds=(answer_to,), start_new_session=True, cwd="/",
            )  # fmt: skip
    finally:
        os.close(answer_to)
