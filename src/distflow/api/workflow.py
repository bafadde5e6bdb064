"""Submit workflows from a program or a notebook, watch them, and fetch their results."""

from __future__ import annotations

import asyncio
import html
import json
import logging
import operator
import os
import shlex
import subprocess
import threading
import time
from collections.abc import AsyncIterator, Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any, SupportsIndex

from distflow.api.notebook import workflow_html
from distflow.api.spec import Spec, yaml_text
from distflow.client import running_tasks, submission, workflows
from distflow.client.client import Client
from distflow.client.failures import DiagnosedGroup, GroupFailure, diagnose_groups, explain_failures
from distflow.client.logs import LogLine, Wait, stream_logs
from distflow.client.measurements.metrics import find_metrics
from distflow.client.measurements.samples import find_samples
from distflow.client.outputs import FetchedFiles, OnOutputProgress, TaskOutputs, fetch_output_files, list_output_files
from distflow.client.specs import Overrides
from distflow.documents.requirements import Requirements
from distflow.documents.text import did_you_mean
from distflow.errors import DistflowError, InputError, WaitTimeout, WorkflowEnded
from distflow.lifecycle.states import State, WorkflowState
from distflow.pools.load import read_hosts
from distflow.pools.model import NodeSettings
from distflow.shell import Secret
from distflow.state.metrics import Metric
from distflow.state.record import EventRecord, Priority, TaskRecord, WorkflowRecord
from distflow.state.samples import ResourceSamples
from distflow.state.search import Search

__all__ = ["GroupInfo", "TaskInfo", "Workflow", "get", "list_workflows", "submit", "submit_checked"]

_log = logging.getLogger("distflow")
_POLL_S = 0.2
_REPORT_EVERY = 25
"""The number of polls of the logs between two checks of the reason for which a workflow waits."""
_CONNECT_TIMEOUT_S = 30


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskInfo:
    """A snapshot of the latest attempt of a task."""

    name: str
    group: str
    status: str
    """``WAITING``, ``INITIALIZING``, ``RUNNING``, ``COMPLETED``, ``FAILED`` and others (``docs/states.md``)."""
    message: str
    """The reason for its end, in one sentence; may be empty."""
    is_lead: bool
    ranks: range
    """Its global ranks. Empty if the group has no ranks."""
    node: str | None
    gpus: tuple[int, ...]
    """The numbers of its GPUs on the node."""
    attempt: int
    """The number of the attempt, counted from 0."""
    exit_code: int | None
    """``None`` if the task has not ended, or has no code, for example because it was canceled before it ran."""
    started_at: datetime | None
    """In UTC, like ``ended_at``."""
    ended_at: datetime | None


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupInfo:
    """A snapshot of a group."""

    name: str
    status: str
    message: str
    """The reason for its wait or its end; may be empty."""
    cause: str
    """The first cause of its failure, such as ``worker on gpu2, rank 11: exit code 1: ValueError: bad label``. May be empty."""
    attempt: int
    """The number of the attempt, counted from 0."""
    tasks: tuple[TaskInfo, ...]


class Workflow:
    """A submitted workflow. ``distflow.submit``, ``distflow.get`` and ``distflow.list`` return it.

    It stores only the id, uuid and name: each property and method reads the current state. Several threads may use it. ::

        workflow = distflow.submit("train.yaml", pool="lab")
        for line in workflow.logs(follow=True):
            print(line.text)
        workflow.wait().raise_for_status()
        workflow.fetch("*.pt", to="models")

    Each method can raise ``StateError`` if the state directory cannot be used, in addition to the errors that it lists.
    """

    def __init__(self, record: WorkflowRecord) -> None:
        """Copy the id, the uuid and the name of a stored workflow."""
        self.id = record.id
        """The id for people: the name of the workflow and a number, such as ``train-3``."""
        self.uuid = record.uuid
        self.name = record.name

    # -- the current state --------------------------------------------------------------------------------------------

    def _record(self, client: Client) -> WorkflowRecord:
        return workflows.find_workflow(client, self.uuid, report_age=False)

    @property
    def status(self) -> str:
        """``PENDING``, ``RUNNING``, ``COMPLETED``, ``FAILED``, ``FAILED_CANCELED`` and others (``docs/states.md``)."""
        with _client() as client:
            return self._record(client).status

    @property
    def is_finished(self) -> bool:
        """Whether the workflow has ended."""
        with _client() as client:
            return self._record(client).state.is_final

    @property
    def groups(self) -> tuple[GroupInfo, ...]:
        """The groups with their tasks, in the order of the spec."""
        with _client() as client:
            return _groups(self._record(client))

    @property
    def tasks(self) -> tuple[TaskInfo, ...]:
        """The tasks of all groups."""
        return tuple(task for group in self.groups for task in group.tasks)

    def raise_for_status(self) -> Workflow:
        """Return this workflow. If it ended and did not complete, raise ``WorkflowEnded`` with the first cause."""
        with _client() as client:
            record = self._record(client)
        if record.state.is_final and record.state is not WorkflowState.COMPLETED:
            cause, why = record.first_cause, record.end_text
            lines = [*(cause.traceback.splitlines() or cause.lines)] if cause else []
            message = f"{self.id}: {record.status}" + (f": {why}" if why else "")
            raise WorkflowEnded(
                message, hint="\n".join([*lines, f"details: workflow.why(), or: distflow workflow why {self.id}"])
            )
        return self

    # -- wait ---------------------------------------------------------------------------------------------------------

    def wait(self, timeout: float | None = None, *, on_update: Callable[[Workflow], object] | None = None) -> Workflow:
        """Wait until the workflow has ended.

        Args:
            timeout: The maximum time to wait, in seconds. Default: no limit.
            on_update: Called with this workflow at the beginning, and each time the status has changed since the last check.

        Returns:
            This workflow, so that ``workflow.wait().raise_for_status()`` is one line.

        Raises:
            WaitTimeout: if it has not ended after ``timeout``. The workflow continues.

        """
        with _client() as client:
            for _ in self._polls(client, timeout, on_update):
                workflows.pause(_POLL_S)
        return self

    async def wait_async(self, timeout: float | None = None) -> Workflow:
        """Wait until the workflow has ended, without blocking the event loop. ``await workflow`` does the same.

        Args:
            timeout: The maximum time to wait, in seconds. Default: no limit.

        Raises:
            WaitTimeout: if it has not ended after ``timeout``. The workflow continues.

        """
        with _client() as client:
            for _ in self._polls(client, timeout, None):
                await asyncio.sleep(_POLL_S)
        return self

    def __await__(self) -> Generator[Any, None, Workflow]:
        """Wait until the workflow has ended, as ``wait_async`` does."""
        return self.wait_async().__await__()

    def _polls(self, client: Client, timeout: float | None, on_update: Callable[[Workflow], object] | None) -> Iterator[None]:
        """Yield before each pause, until the workflow has ended."""
        deadline = None if timeout is None else time.monotonic() + timeout
        shown = None
        while True:
            record = self._record(client)
            if on_update is not None and record.status != shown:
                shown = record.status
                on_update(self)
            if record.state.is_final:
                return
            if deadline is not None and time.monotonic() >= deadline:
                raise WaitTimeout(f"{self.id} has not ended within {timeout:g} s: {record.status}")
            yield

    # -- output -------------------------------------------------------------------------------------------------------

    def logs(
        self,
        *,
        follow: bool = False,
        task: str | Sequence[str] = (),
        rank: SupportsIndex | Sequence[int] = (),
        attempt: int | None = None,
        last: int | None = None,
    ) -> Iterator[LogLine]:
        """Yield the output lines of tasks, merged by time. A line arrives soon after it was printed.

        Args:
            follow: Whether to wait for new lines until the workflow has ended.
            task: Names of tasks. Default: all tasks, or with ``rank``, the tasks that hold these ranks.
            rank: Global ranks. With ``task``, their lines are added to all lines of the named tasks. Default: all ranks.
            attempt: Only lines of this attempt, counted from 0. Default: all attempts.
            last: Start with this number of the newest existing lines. Default: all of them.

        Raises:
            NotFound: if a task or a rank does not exist.

        """
        with _client() as client:
            workflows.choose_tasks(
                self._record(client), _several(task), _ranks(rank)
            )  # raise errors now, not with the first line
        return self._lines(workflows.pause, follow=follow, task=task, rank=rank, attempt=attempt, last=last)

    async def logs_async(
        self,
        *,
        follow: bool = True,
        task: str | Sequence[str] = (),
        rank: SupportsIndex | Sequence[int] = (),
        attempt: int | None = None,
        last: int | None = None,
    ) -> AsyncIterator[LogLine]:
        """Yield the output lines of tasks as ``logs`` does, without blocking the event loop. By default, ``follow`` is true."""
        stop = threading.Event()

        def wait(seconds: float) -> None:
            if stop.wait(seconds):
                raise asyncio.CancelledError

        lines = self._lines(wait, follow=follow, task=task, rank=rank, attempt=attempt, last=last)
        loop = asyncio.get_running_loop()
        thread = ThreadPoolExecutor(max_workers=1)  # an SQLite connection works only in the thread that opened it
        try:
            while (line := await loop.run_in_executor(thread, partial(next, lines, None))) is not None:
                yield line
        finally:
            stop.set()
            thread.submit(lines.close)
            thread.shutdown(wait=False)

    def _lines(
        self,
        wait: Wait,
        *,
        follow: bool,
        task: str | Sequence[str],
        rank: SupportsIndex | Sequence[int],
        attempt: int | None,
        last: int | None,
    ) -> Generator[LogLine, None, None]:
        names, ranks = _several(task), _ranks(rank)
        with _client() as client:
            record = self._record(client)
            tasks = workflows.choose_tasks(record, names, ranks)
            stream = stream_logs(
                client, record, tasks, names=names, ranks=ranks, attempt=attempt, last=last, follow=follow,
                wait=self._reporting(wait),
            )  # fmt: skip
            yield from stream
            for remark in stream.remarks():
                _log.warning("%s", remark)

    def _reporting(self, wait: Wait) -> Wait:
        """Return a ``wait`` that also logs a warning when the reason why a group waits for resources has changed."""
        polls, logged = 0, dict[str, str]()

        def reporting(seconds: float) -> None:
            nonlocal polls
            polls += 1
            if polls % _REPORT_EVERY == 0:
                for group in self.groups:
                    if group.status == State.SCHEDULING.value and group.message and logged.get(group.name) != group.message:
                        logged[group.name] = group.message
                        _log.warning("%s waits: %s", self.id, group.message)
            wait(seconds)

        return reporting

    def events(self, *, follow: bool = False, task: str | Sequence[str] = ()) -> Iterator[EventRecord]:
        """Yield the events of the workflow, oldest first. An event has ``at``, ``code``, ``task`` and ``text``.

        Args:
            follow: Whether to wait for new events until the workflow has ended.
            task: Only events of these tasks. Default: all events.

        """
        with _client() as client:
            yield from workflows.read_events(client, self._record(client), tasks=_several(task) or None, follow=follow)

    def metrics(
        self, *keys: str, task: str | Sequence[str] = (), rank: int | None = None, attempt: int | None = None
    ) -> list[Metric]:
        """Return the metrics that tasks printed. Each has ``task``, ``rank``, ``step``, ``time`` and ``values``.

        Args:
            keys: Names of metrics. Default: all.
            task: Names of tasks. Default: all tasks.
            rank: Only metrics of this rank. Default: all ranks.
            attempt: Only metrics of this attempt, counted from 0. Default: all attempts.

        Raises:
            NotFound: if a task does not exist, or if the tasks printed metrics, but none with these names.

        """
        with _client() as client:
            record = self._record(client)
            tasks = workflows.choose_tasks(record, _several(task))
            return [*find_metrics(client, record, tasks, rank=rank, keys=keys, attempt=attempt)]

    def samples(
        self, *, task: str | Sequence[str] = (), attempt: int | None = None, most: int | None = None
    ) -> list[ResourceSamples]:
        """Return the recorded use of CPU, memory, disk, network and GPUs by tasks (docs/metrics.md).

        An element has ``task``, ``attempt``, ``times`` (seconds since the epoch), ``series`` (name to values) and ``limits``.

        Args:
            task: Names of tasks. Default: all tasks.
            attempt: Only samples of this attempt, counted from 0. Default: all attempts.
            most: The maximum number of samples of each attempt. More samples are averaged. Default: all samples.

        Raises:
            NotFound: if a task does not exist.

        """
        with _client() as client:
            record = self._record(client)
            return find_samples(client, record, workflows.choose_tasks(record, _several(task)), attempt=attempt, most=most)

    # -- failures -----------------------------------------------------------------------------------------------------

    def why(self, *, attempt: int | None = None) -> list[GroupFailure]:
        """Return the first cause and the timeline of each failed group. The list is empty if no group failed.

        Args:
            attempt: The attempt to explain, counted from 0. Default: the latest one.

        Raises:
            NotFound: if no group has the attempt.

        """
        with _client() as client:
            return explain_failures(client, self._record(client), attempt=attempt)

    def diagnose(self, *, attempt: int | None = None) -> list[DiagnosedGroup]:
        """Return the diagnoses, with remedies, of each group that failed, may hang, or waits for ranks that are gone.

        Args:
            attempt: The attempt to diagnose, counted from 0. Default: the latest one. Groups without this attempt are left out.

        """
        with _client() as client:
            return diagnose_groups(client, self._record(client), attempt=attempt)

    # -- change it ----------------------------------------------------------------------------------------------------

    def cancel(self, message: str = "", *, force: bool = False) -> Workflow:
        """Request the end of the workflow, without waiting for it. See ``wait``.

        Args:
            message: A reason, which is stored with the workflow.
            force: Whether to kill the tasks immediately, without a grace period after SIGTERM.

        Raises:
            InputError: if the workflow has ended.
            SupervisorError: if the supervisor does not start. The request is stored in this case.

        """
        with _client() as client:
            (result,) = workflows.cancel(client, [self.uuid], message=message, force=force)
        if result.error is not None:
            raise result.error
        return self

    def restart(self, *, pool: str | None = None, secrets: Mapping[str, str] | None = None) -> Workflow:
        """Submit a new workflow that runs the groups that did not complete, and return it.

        Args:
            pool: The name of the pool. Default: the pool of this workflow.
            secrets: The secret variables of the first submission, whose values are not kept for a restart.

        Raises:
            InputError: if the workflow has not ended, has completed, or needs a secret that is not given. Also if a needed
                output does not exist, or if a package for the pool or for data at URLs is not installed.
            NodeError: if an output that the new workflow needs cannot be fetched.
            NotFound: if the pool does not exist.
            ProblemsFound: if the spec is no longer valid, or if the pool cannot hold a group.
            StorageRefused: if this user has no credentials for an S3 URL in the spec.
            SupervisorError: if the supervisor does not start.

        """
        with _client() as client:
            return Workflow(
                submission.restart(client, submission.plan_restart(client, self.uuid, _overrides(None, secrets), pool=pool))
            )

    def exec(
        self, command: str | Sequence[str], *, task: str | Sequence[str] = (), connect_timeout: int = _CONNECT_TIMEOUT_S
    ) -> dict[str, subprocess.CompletedProcess[str]]:
        """Run a command next to running tasks: on their nodes, with their directory, environment and GPUs.

        Args:
            command: The command. A text is split at spaces and quotes as in a shell.
            task: Names of tasks. Default: all running tasks.
            connect_timeout: The maximum time for a node to respond, in seconds.

        Returns:
            The exit code and the output of the command for each task.

        Raises:
            InputError: if the command is empty or has a quote that is not closed, if a named task is not running, if no task
                is running, or if a secret of a task is no longer stored.
            NotFound: if a task does not exist.
            NodeError: if a node is unreachable or refuses the command.

        """
        try:
            argv = shlex.split(command) if isinstance(command, str) else list(command)
        except ValueError as error:
            raise InputError(f"`{command}` cannot be split into arguments: {error}") from None
        if not argv:
            raise InputError("`command` is empty", hint="pass a command, such as `nvidia-smi`")
        names = _several(task)
        with _client() as client:
            record = self._record(client)
            chosen = [pair for pair in workflows.choose_tasks(record, names) if names or pair[1].state is State.RUNNING]
            if not chosen:
                raise InputError(running_tasks.describe_no_running_task(record))
            tasks = [running_tasks.running_task(client, record, group, one, connect_timeout) for group, one in chosen]
        output: dict[tuple[int, bool], bytearray] = {}
        codes: dict[int, int] = {}
        ended = running_tasks.run_on_tasks(
            tasks,
            argv,
            connect_timeout,
            on_output=lambda number, is_error, data: output.setdefault((number, is_error), bytearray()).extend(data),
            on_exit=lambda number, end: codes.update({number: end.code}),
        )
        if ended.errors:
            raise ended.errors[0]
        return {
            one.task: subprocess.CompletedProcess(
                argv,
                codes[number],
                *(output.get((number, is_error), bytearray()).decode(errors="replace") for is_error in (False, True)),
            )
            for number, one in enumerate(tasks)
        }

    # -- results ------------------------------------------------------------------------------------------------------

    def outputs(self, *, task: str | Sequence[str] = ()) -> tuple[TaskOutputs, ...]:
        """List the output files of tasks that run or have ended. A node's error is in its tasks' results, and not raised.

        Args:
            task: Names of tasks. Default: all tasks that have run.

        Raises:
            InputError: if a named task has not run, or if no task has run.
            NotFound: if a task does not exist.

        """
        with _client() as client:
            return list_output_files(client, self._record(client), tasks=_several(task))

    def fetch(
        self,
        *paths: str,
        to: str | os.PathLike[str] = "outputs",
        task: str | Sequence[str] = (),
        on_progress: OnOutputProgress | None = None,
    ) -> FetchedFiles:
        """Copy output files to this machine. Files that exist here with the same size and modification time are skipped.

        Args:
            paths: Files, directories and patterns (``*.pt``), relative to the output directories. Default: all files.
            to: The local directory. If files of several tasks are chosen, each task has a subdirectory.
            task: Names of tasks. Default: all tasks that have run.
            on_progress: Called with an object whose ``done`` and ``total`` are in bytes.

        Raises:
            DistflowError: the first error of a task, such as an unreachable node. The files of other tasks have been copied.
            InputError: if a named task has not run, or if no task has run.
            NotFound: if a task does not exist, or if all nodes have answered and one of ``paths`` matches no file.
            StorageError: if ``to`` cannot be created or does not have enough space.

        """
        with _client() as client:
            fetched = fetch_output_files(
                client,
                self._record(client),
                Path(to),
                tasks=_several(task),
                paths=paths,
                on_progress=on_progress or (lambda _: None),
            )
        if fetched.errors:
            raise fetched.errors[0]
        return fetched

    # -- for people ---------------------------------------------------------------------------------------------------

    def __eq__(self, other: object) -> bool:
        """Return whether the other one is the same workflow."""
        return isinstance(other, Workflow) and other.uuid == self.uuid

    def __hash__(self) -> int:
        """Return the hash of the uuid."""
        return hash(self.uuid)

    def __repr__(self) -> str:
        """Return the id and the current status."""
        try:
            return f"<Workflow {self.id}: {self.status}>"
        except DistflowError:
            return f"<Workflow {self.id}>"

    def _repr_html_(self) -> str:
        """Return the status, the tasks with their ranks, and the loss as a curve, for a notebook."""
        try:
            return workflow_html(self)
        except DistflowError as error:
            return f"<pre>{html.escape(f'{self!r}: {error}')}</pre>"


def submit(
    spec: str | os.PathLike[str] | Mapping[str, Any] | Spec,
    *,
    pool: str | None = None,
    hosts: str | os.PathLike[str] | Sequence[str] | None = None,
    set: Mapping[str, object] | None = None,
    python: str | None = None,
    venv: str | os.PathLike[str] | Sequence[str] | None = None,
    secrets: Mapping[str, str] | None = None,
    labels: Mapping[str, str] | None = None,
    priority: str | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> Workflow:
    """Check a spec, submit it, and return the workflow. It runs in the background, also after this program has ended.

    Args:
        spec: The path of a YAML file, a YAML text of several lines, the mapping that such a file contains, a ``Spec``, or the
            id of a workflow to submit again. Paths in a text, a mapping or a ``Spec`` are relative to the working directory.
        pool: The name of the pool. Default: the pool of the workflow to submit again or of the spec, or else the default pool.
        hosts: Machines to use instead of the nodes of the pool: the path of a hostfile, or its lines, such as
            ``["gpu1 slots=8", "gpu2"]``.
        set: Values of template variables.
        python: The Python interpreter on the nodes, for tasks and for distflow. Default: the pool's.
        venv: A requirements file, or its lines, from which each node builds an environment once. Default: the ``venv`` of
            the spec, or else of the pool.
        secrets: Secret environment variables for every task. They are stored only until the workflow has ended.
        labels: Labels in addition to those of the spec.
        priority: ``HIGH``, ``NORMAL`` or ``LOW``. Default: that of the workflow to submit again, or else ``NORMAL``.
        on_progress: Called with the number of bytes of files that have been read, and with the total number.

    Raises:
        InputError: if an argument is invalid or does not fit the spec, or if a package for the pool or for data at URLs is not
            installed.
        NodeError: if an output of another workflow, which the spec uses, cannot be fetched.
        NotFound: if the pool or a workflow does not exist.
        ProblemsFound: if the spec has errors, or if the pool cannot hold a group. It contains the findings with their lines.
        StorageRefused: if this user has no credentials for an S3 URL in the spec.
        SupervisorError: if the supervisor does not start. The workflow is stored nevertheless, except if the supervisor of an
            older version of distflow is running and cannot be stopped.

    """
    return submit_checked(
        spec, lambda _: None, pool=pool, hosts=hosts, set=set, python=python, venv=venv, secrets=secrets, labels=labels,
        priority=priority, on_progress=on_progress,
    )  # fmt: skip


def submit_checked(
    spec: str | os.PathLike[str] | Mapping[str, Any] | Spec,
    check: Callable[[submission.PlannedWorkflow], None],
    *,
    pool: str | None = None,
    hosts: str | os.PathLike[str] | Sequence[str] | None = None,
    set: Mapping[str, object] | None = None,
    python: str | None = None,
    venv: str | os.PathLike[str] | Sequence[str] | None = None,
    secrets: Mapping[str, str] | None = None,
    labels: Mapping[str, str] | None = None,
    priority: str | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> Workflow:
    """Submit as ``submit`` does, but call ``check`` before anything is stored. An error in it prevents the submission."""
    name, text = _source(spec)
    with _client() as client:
        client.load_supervisor()
        configuration = client.configuration()
        client.load_backends(configuration, with_hosts=hosts is not None)
        request = submission.SubmitRequest(
            spec=name,
            text=text,
            overrides=_overrides(set, secrets),
            pool=pool,
            hosts=None if hosts is None else read_hosts(hosts),
            settings=NodeSettings(python=python, venv=None if venv is None else _requirements(venv)),
            labels=labels or {},
            priority=_priority(priority),
        )
        planned = submission.plan(client, request, configuration=configuration, on_pack=on_progress)
        for warning in planned.checked.warnings:
            _log.warning("%s", warning)
        check(planned)
        return Workflow(submission.submit(client, planned))


def get(key: str) -> Workflow:
    """Return a submitted workflow.

    Args:
        key: Its id (``train-3``), its uuid, or its name for the latest run. ``-`` is the latest workflow.

    Raises:
        NotFound: if there is no such workflow.

    """
    with _client() as client:
        return Workflow(workflows.find_workflow(client, key, report_age=False))


def list_workflows(
    *,
    name: str | None = None,
    status: str | Sequence[str] = (),
    pool: str | Sequence[str] = (),
    tag: str | Sequence[str] = (),
    labels: Mapping[str, str] | None = None,
    count: int = 20,
    offset: int = 0,
) -> list[Workflow]:
    """Return submitted workflows, newest first.

    Args:
        name: A part of the id.
        status: Statuses, one of which the workflow has, such as ``RUNNING``. Default: any.
        pool: Names of pools. Default: all pools.
        tag: Tags, one of which the workflow has. Default: any.
        labels: Labels, all of which the workflow has. In a value, ``*`` matches any text, and ``(a|b)`` matches ``a`` or ``b``.
        count: The maximum number of workflows.
        offset: The number of newest matching workflows to skip.

    Raises:
        InputError: if a status does not exist, or if the value of a label is not a valid pattern.

    """
    statuses = _several(status)
    search = Search(
        statuses=workflows.parse_statuses(statuses) if statuses else None,
        name=name,
        pools=_several(pool),
        tags=_several(tag),
        labels=tuple((labels or {}).items()),
    )
    with _client() as client:
        return [Workflow(record) for record in workflows.list_workflows(client, search, count=count, offset=offset)]


@contextmanager
def _client() -> Iterator[Client]:
    """A client for one call, whose notes and warnings are logged."""
    with Client(notify=lambda text: _log.warning("%s", text)) as client:
        yield client


def _source(spec: str | os.PathLike[str] | Mapping[str, Any] | Spec) -> tuple[str, str | None]:
    """Return the name of a spec for messages, and its text, which is ``None`` if ``spec`` is a path or a workflow's id."""
    if isinstance(spec, Spec):
        return f"<spec {spec.name}>", spec.to_yaml()
    if isinstance(spec, Mapping):
        return "<spec>", yaml_text(spec)
    if isinstance(spec, str) and "\n" in spec:
        return "<spec>", spec
    if isinstance(spec, str | os.PathLike):
        return os.fspath(spec), None
    raise InputError(f"a spec must be a path, a workflow's id, YAML text, a mapping or a `Spec`, not {spec!r}")


def _requirements(venv: str | os.PathLike[str] | Sequence[str]) -> Requirements:
    from distflow.documents.requirements_file import parse_requirements, read_requirements  # noqa: PLC0415  few programs use it

    return read_requirements(os.fspath(venv)) if isinstance(venv, str | os.PathLike) else parse_requirements(venv, "<venv>")


def _overrides(values: Mapping[str, object] | None, secrets: Mapping[str, str] | None) -> Overrides:
    for name, value in (secrets or {}).items():
        if not isinstance(value, str):
            raise InputError(f"the value of the secret `{name}` is not a string")
    variables = values or {}
    return Overrides(
        sets=tuple((name, json.dumps(value, default=str)) for name, value in variables.items() if not isinstance(value, str)),
        set_strings=tuple((name, value) for name, value in variables.items() if isinstance(value, str)),
        secrets={name: Secret(value) for name, value in (secrets or {}).items()},
    )


def _priority(text: str | None) -> Any:
    if text is None or str(text).upper() in Priority.__members__:
        return text and Priority[text.upper()]
    raise InputError(f"`{text}` is not a priority", hint=did_you_mean(text, Priority.__members__, what="priorities"))


def _several(names: str | Sequence[str]) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else tuple(names)


def _ranks(rank: SupportsIndex | Sequence[int]) -> tuple[int, ...]:
    return tuple(rank) if isinstance(rank, Sequence) else (operator.index(rank),)


def _time(at: float | None) -> datetime | None:
    return None if at is None else datetime.fromtimestamp(at, timezone.utc)


def _groups(record: WorkflowRecord) -> tuple[GroupInfo, ...]:
    return tuple(
        GroupInfo(
            name=group.name,
            status=group.status,
            message=group.message,
            cause=group.cause.text if group.cause else "",
            attempt=group.attempt,
            tasks=tuple(_task(group.name, task) for task in group.tasks),
        )
        for group in record.groups
    )


def _task(group: str, task: TaskRecord) -> TaskInfo:
    return TaskInfo(
        name=task.name,
        group=group,
        status=task.status,
        message=task.message,
        is_lead=task.lead,
        ranks=workflows.held_ranks(task.ranks),
        node=task.node,
        gpus=task.gpu_ids,
        attempt=task.attempt,
        exit_code=task.exit_code,
        started_at=_time(task.started_at),
        ended_at=_time(task.ended_at),
    )
