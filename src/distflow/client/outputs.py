"""List the output files of tasks that have ended or still run, and fetch them from their nodes.

A task's output files are the files in its ``{{output}}`` directory. They stay on the node until ``distflow node clean``
removes them. In pools of Kubernetes, they are lost when the task's pod ends.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import Struct

from distflow.client.client import Client
from distflow.client.previous_outputs import OutputSource, output_source
from distflow.client.results_directory import claim_directory, directory_problem
from distflow.client.workflows import choose_tasks
from distflow.documents.text import did_you_mean, ranges
from distflow.errors import AgentError, DistflowError, InputError, NodeError, NodeUnreachable, NotFound, StorageError
from distflow.state.record import WorkflowRecord
from distflow.structs import replace
from distflow.transports.base import fan_out

if TYPE_CHECKING:
    from distflow.backends.machines.connection.output_reader import FetchCounts, OutputReader, Place, RemoteFile
    from distflow.transports.base import Transport

__all__ = [
    "FetchedFiles",
    "OnOutputProgress",
    "OutputFile",
    "OutputProgress",
    "TaskOutputs",
    "fetch_output_files",
    "list_output_files",
]

_TRIES = 3
"""Give up after this many broken connections since the last progress. Each connection continues where the last one ended."""
_NODES_AT_ONCE = 32
_FEW_NAMES = 10
"""The maximum number of files that an error names."""


class OutputFile(Struct, frozen=True, kw_only=True):
    """A file of a task on its node."""

    path: str
    """The path relative to the task's output directory."""
    size: int
    """Bytes. If ``link`` is set: the size of the link itself."""
    modified_at: float
    """Seconds since the epoch, by the node's clock."""
    link: str = ""
    """The relative target of a symbolic link to a path inside the output directory. Otherwise empty."""


class TaskOutputs(Struct, frozen=True, kw_only=True):
    """The output files of one task."""

    task: str
    node: str
    directory: str
    """The directory on the node."""
    files: tuple[OutputFile, ...] = ()
    """Sorted by name in each directory."""
    left_out: int = 0
    """The number of entries that cannot be fetched: sockets, pipes, devices, and links to nothing or to other directories."""
    error: DistflowError | None = None
    """Why the files are unknown or could not be fetched. For example, the node is unreachable."""


class OutputProgress(Struct, frozen=True, kw_only=True):
    """The progress of ``fetch_output_files``."""

    done: int
    """Bytes on this machine, including those of files that were fetched before."""
    total: int
    """Bytes of all chosen files."""
    files: int
    """The number of chosen files."""


OnOutputProgress = Callable[[OutputProgress], None]
"""A progress callback. It is called often. Several threads call it, but only one at a time."""


class FetchedFiles(Struct, frozen=True, kw_only=True):
    """The result of ``fetch_output_files``."""

    folders: Mapping[str, Path]
    """The local directory of each task whose files were chosen."""
    files: int
    """The number of files that were copied."""
    size: int
    """Their size in bytes."""
    unchanged: int
    """The number of files that were skipped, because they existed on this machine."""
    left_out: int
    """The number of entries that were not fetched: ``TaskOutputs.left_out``, and links out of the local directory."""
    problems: tuple[str, ...] = ()
    """Files that could not be read on their node, each with the reason."""
    errors: tuple[DistflowError, ...] = ()
    """An error for each task whose files could not be fetched. The files of other tasks were fetched."""
    moved: Path | None = None
    """The directory to which the results of an earlier workflow were moved; ``None`` if there were none."""
    is_mixed: bool = False
    """Whether the directory had files and no marker, so distflow did not mark it as the results of one workflow."""


def list_output_files(
    client: Client, record: WorkflowRecord, *, tasks: Sequence[str] = (), place: Place = "output", attempt: int | None = None
) -> tuple[TaskOutputs, ...]:
    """List the output files of the tasks of a workflow, which may have ended or still run.

    This queries the nodes of the tasks, many at the same time.

    Args:
        client: The client whose store has the workflow.
        record: The workflow.
        tasks: Names of tasks. Default: all tasks that have run.
        place: ``output`` for the ``{{output}}`` directory, or ``work`` for the files that the task's command wrote to its
            working directory.
        attempt: The attempt of each task, counted from 0. Default: its latest one.

    Returns:
        The files of each task, in the order of the spec. A node's error is part of its result and is not raised.

    Raises:
        InputError: if one of the named tasks has not run, or if no task has run in the chosen attempt.
        NotFound: if the workflow does not have one of the tasks, or if a task does not have the attempt.

    """
    with _Nodes(_sources(client, record, tasks, place, attempt), place) as nodes:
        return tuple(one.outputs for one in nodes.read_lists())


def fetch_output_files(
    client: Client,
    record: WorkflowRecord,
    folder: Path,
    *,
    tasks: Sequence[str] = (),
    paths: Sequence[str] = (),
    place: Place = "output",
    attempt: int | None = None,
    is_claimed: bool = False,
    on_progress: OnOutputProgress = lambda _: None,
) -> FetchedFiles:
    """Copy output files of a workflow's tasks from their nodes to a local directory.

    The files of one task are written to ``folder`` itself. If files of several tasks are chosen, those of each task are written
    to a subdirectory with the task's name. Paths and modification times are kept. A file appears when it is complete. Existing
    files with the same size and modification time are skipped, and others are replaced. Nothing is deleted.

    A broken connection is retried. After an error or an interrupt, call the function again: it continues where it stopped. ::

        record = find_workflow(client, "train-3")
        fetched = fetch_output_files(client, record, Path("outputs"), on_progress=lambda one: print(one.done, one.total))
        for error in fetched.errors:
            print(error)

    Args:
        client: The client whose store has the workflow.
        record: The workflow.
        folder: The local directory. It is created when there are files to write.
        tasks: Names of tasks. Default: all tasks that have run.
        paths: Files and directories to fetch, relative to the task's directory. ``*``, ``?`` and ``[…]`` match as in
            ``fnmatch``, so ``*`` also matches ``/``. Default: all files.
        place: ``output`` for the ``{{output}}`` directory, or ``work`` for the files that the task's command wrote to its
            working directory.
        attempt: The attempt of each task, counted from 0. Default: its latest one.
        is_claimed: Whether ``folder`` is only for the results of this workflow. If it is new, empty, or has the results of
            another workflow, it gets a marker file that keeps it from being sent with a project. Results of another workflow
            are first moved to its subdirectory ``earlier-runs``.
        on_progress: Called with the progress in bytes. See ``OnOutputProgress``.

    Returns:
        The counts, which are 0 if the tasks have no files, and an error for each task whose files could not be fetched. These
        errors are not raised. Reasons are an unreachable node, or too little space for the files in ``folder``.

    Raises:
        InputError: if one of the named tasks has not run, or if no task has run in the chosen attempt.
        NotFound: if the workflow does not have one of the tasks, if a task does not have the attempt, or if all nodes have
            answered and one of ``paths`` matches no file.
        StorageError: if ``folder`` cannot be created, or if the results of another workflow cannot be moved.

    """
    with _Nodes(_sources(client, record, tasks, place, attempt), place) as nodes:
        options = (" --workdir" if place == "work" else "") + (f" --retry-id {attempt}" if attempt is not None else "")
        chosen = _choose(nodes.read_lists(), paths, f"distflow workflow outputs {record.id}{options}")
        names = [one.outputs.task for one in chosen]
        folders = {name: folder / name if len(names) > 1 else folder for name in names}
        is_own, moved = claim_directory(folder, record) if is_claimed and folders else (True, None)
        _make_folders(folders)
        progress = _Progress(chosen, on_progress)
        counts = nodes.fetch(chosen, folders, progress)
        return FetchedFiles(
            folders=folders,
            files=sum(one.files for one in counts),
            size=sum(one.size for one in counts),
            unchanged=sum(one.unchanged for one in counts),
            left_out=sum(one.left_out for one in counts) + sum(one.outputs.left_out for one in nodes.tasks),
            problems=tuple(f"{task}: {text}" for task, one in zip(names, counts, strict=True) for text in one.problems),
            errors=tuple(one.outputs.error for one in nodes.tasks if one.outputs.error is not None),
            moved=moved,
            is_mixed=not is_own,
        )


class _Task(Struct, kw_only=True):
    """A task and its files."""

    source: OutputSource
    outputs: TaskOutputs
    files: tuple[RemoteFile, ...] = ()
    """The files that the node reported. After ``_choose``: only the chosen ones."""

    @property
    def size(self) -> int:
        return sum(one.size for one in self.files if not one.link)


def _sources(client: Client, record: WorkflowRecord, tasks: Sequence[str], place: Place, attempt: int | None) -> list[_Task]:
    """Return the chosen tasks, with the locations of their files."""
    found = []
    for group_name, latest in choose_tasks(record, tasks):
        attempts = [one for one in record.group(group_name).attempts if one.name == latest.name]
        task = latest if attempt is None else next((one for one in attempts if one.attempt == attempt), None)
        if task is None:
            numbers = ranges(one.attempt for one in attempts)
            raise NotFound(f"{latest.name} of {record.id} has no attempt {attempt}", hint=f"its attempts: {numbers}")
        if not tasks and (task.node is None or task.output_dir is None):
            continue
        source = output_source(client, record, record.group(group_name), task)
        directory = os.path.join(os.path.dirname(task.output_dir or ""), place)
        found.append(_Task(source=source, outputs=TaskOutputs(task=task.name, node=source.node, directory=directory)))
    if not found:
        earlier = sorted({one.attempt for group in record.groups for one in group.attempts if one.output_dir is not None})
        which = f" in attempt {attempt}" if attempt is not None else " in its latest attempt" if earlier else ""
        kind = "an earlier" if attempt is None else "another"
        hint = f"to see the files of {kind} attempt, add --retry-id {earlier[-1]}" if earlier else ""
        hint = hint or f"its status: distflow workflow query {record.id}"
        raise InputError(f"no task of {record.id} has run{which}, so there are no output files", hint=hint)
    return found


def _choose(tasks: Sequence[_Task], paths: Sequence[str], command: str) -> list[_Task]:
    """Return the tasks that have files that match ``paths``, and keep only these files.

    Raise ``NotFound`` if all nodes have answered and one of ``paths`` matches no file. Its hint names ``command``, which lists
    the files of ``tasks``.
    """
    patterns = [(path, path.removeprefix("{{output}}").lstrip("/").removeprefix("./").rstrip("/")) for path in paths]
    matched = set()
    for task in tasks:
        files = []
        for file in task.files:
            hits = {path for path, pattern in patterns if _matches(file.name, pattern)}
            matched |= hits
            if hits or not patterns:
                files.append(file)
        task.files = tuple(files)
    missing = next((path for path in paths if path not in matched), None)
    if missing is not None and not any(task.outputs.error for task in tasks):
        names = sorted({file.path for task in tasks for file in task.outputs.files})
        hint = (
            did_you_mean(missing, names, what="files")
            if len(names) <= _FEW_NAMES
            else f"list the {len(names):,} files: {command}"
        )
        raise NotFound(f"no output file matches `{missing}`", hint=hint)
    return [task for task in tasks if task.files]


def _matches(name: str, pattern: str) -> bool:
    return pattern in ("", ".", name) or name.startswith(f"{pattern}/") or fnmatchcase(name, pattern)


def _make_folders(folders: Mapping[str, Path]) -> None:
    try:
        for folder in folders.values():
            folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        where = f"`{error.filename}`" if error.filename else "the directory"
        message = f"cannot write to {where}: {directory_problem(error)}"
        raise StorageError(message, hint="choose another directory") from error


class _Progress:
    """Adds the progress of all files."""

    def __init__(self, tasks: Sequence[_Task], on_progress: OnOutputProgress) -> None:
        self._files = sum(len(task.files) for task in tasks)
        self._total = sum(task.size for task in tasks)
        self._on_progress = on_progress
        self._lock = threading.Lock()
        self._done: dict[tuple[str, str], int] = {}
        self._sum = 0

    def update(self, task: str, name: str, done: int) -> None:
        with self._lock:
            self._sum += done - self._done.get((task, name), 0)
            self._done[task, name] = done
            self._on_progress(OutputProgress(done=self._sum, total=max(self._total, self._sum), files=self._files))


class _Nodes:
    """The connections to the nodes of some tasks, as a context manager."""

    def __init__(self, tasks: Sequence[_Task], place: Place) -> None:
        self.tasks = tasks
        self._place = place
        self._open = ExitStack()
        self._transports: dict[tuple[str, str], Transport] = {}

    def __enter__(self) -> _Nodes:
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def read_lists(self) -> Sequence[_Task]:
        """Read the list of files of each task from its node."""

        def read(task: _Task) -> None:
            with self._reader(task) as reader:
                task.files = reader.files
                task.outputs = replace(
                    task.outputs,
                    files=tuple(
                        OutputFile(path=one.name, size=one.size, modified_at=one.modified_ns / 1e9, link=one.link)
                        for one in reader.files
                    ),
                    left_out=reader.others,
                )

        self._on_nodes(self.tasks, read)
        return self.tasks

    def fetch(self, tasks: Sequence[_Task], folders: Mapping[str, Path], progress: _Progress) -> list[FetchCounts]:
        """Fetch the chosen files of tasks. Return one result for each task, in order."""
        from distflow.backends.machines.connection.output_reader import FetchCounts

        counts = {id(task): FetchCounts() for task in tasks}

        def read(task: _Task) -> None:
            name, tries_left = task.outputs.task, _TRIES
            reached: dict[str, int] = {}

            def on_progress(file: str, done: int) -> None:
                nonlocal tries_left
                if done > reached.get(file, 0):
                    reached[file], tries_left = done, _TRIES
                progress.update(name, file, done)

            while True:
                try:
                    with self._reader(task) as reader:
                        wanted = {one.name for one in task.files}
                        files = [one for one in reader.files if one.name in wanted]
                        reader.fetch(files, folders[name], on_progress, counts[id(task)])
                    return
                except NodeUnreachable:
                    tries_left -= 1
                    if not tries_left:
                        raise

        self._on_nodes(tasks, read)
        return [counts[id(task)] for task in tasks]

    def _reader(self, task: _Task) -> OutputReader:
        from distflow.backends.machines.connection.output_reader import OutputReader

        source = task.source
        node = source.pool.node(source.node)
        return OutputReader(
            self._transports[_node_of(task)], node.root, node.python, source.attempt, place=self._place,
            timeout_s=source.pool.connect_timeout_s,
        )  # fmt: skip

    def _on_nodes(self, tasks: Sequence[_Task], action: Callable[[_Task], None]) -> None:
        """Call ``action`` for each task, for many nodes at the same time. An error is stored in ``outputs`` of its task."""
        by_node: dict[tuple[str, str], list[_Task]] = {}
        for task in tasks:
            by_node.setdefault(_node_of(task), []).append(task)
        for key, (task, *_) in by_node.items():
            if key not in self._transports:
                from distflow.backends.machines.backend import transport_of

                node = task.source.pool.node(task.source.node)
                self._transports[key] = self._open.enter_context(closing(transport_of(task.source.pool, node)))
        tasks_of = {id(self._transports[key]): tasks for key, tasks in by_node.items()}

        def act(transport: Transport) -> None:
            for task in tasks_of[id(transport)]:
                try:
                    action(task)
                except DistflowError as error:
                    task.outputs = replace(task.outputs, error=_explained(task, error))

        fan_out([self._transports[key] for key in by_node], act, limit=_NODES_AT_ONCE)


def _node_of(task: _Task) -> tuple[str, str]:
    """Return a key that is equal for tasks on one node: the workflow, which has one pool, and the name of the node."""
    return task.source.attempt.partition("/")[0], task.source.node


def _explained(task: _Task, error: DistflowError) -> DistflowError:
    """Return a node's error with the task's name, and with a remedy if the files were removed; any other error unchanged."""
    if isinstance(error, AgentError) and error.kind == "not_found":
        return AgentError(
            error.node, error.kind, f"the files of {task.source.shown} are gone: {error.detail}",
            hint="`distflow node clean` removes the files of ended workflows, and a node may have been reinstalled",
        )  # fmt: skip
    if isinstance(error, NodeError):
        return NodeError(error.node, f"the files of {task.source.shown} cannot be read: {error.detail}", hint=error.hint)
    return error
