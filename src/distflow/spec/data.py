"""Data of tasks: ``inputs`` from other tasks, URLs and datasets, ``outputs``, ``checkpoint`` and ``shared``.

Inputs from other tasks also define the order of groups. The group of a task with an input waits for the group of the task that
the input names. As in OSMO, that group must come earlier in the file, so there are no cycles. The message for an input that
would cause a cycle describes the cycle. An input may also name a task of an earlier workflow: ``<workflow>:<task>``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from posixpath import normpath

from msgspec import Struct

from distflow.documents.document import Text, View
from distflow.documents.quantities import parse_duration
from distflow.documents.text import did_you_mean
from distflow.documents.urls import parse_dataset, parse_url
from distflow.errors import InputError
from distflow.spec.model import CheckpointSpec, DataSpec, EarlierInput, InputSpec, TaskSpec
from distflow.spec.tokens import find_tokens

__all__ = [
    "Graph",
    "checkpoints",
    "earlier_inputs",
    "shared_directory",
    "upstream_of",
    "url_inputs",
    "url_outputs",
]


_SHARED_EVERY_S = 300.0


def url_inputs(task: View) -> tuple[DataSpec, ...]:
    """Return the entries of ``inputs`` that name a URL or a dataset. Add findings for invalid entries."""
    found = []
    for position, entry in enumerate(task.views("inputs")):
        if entry.has("url") and not entry.has("task"):
            found.append(_data(entry, position, writes=False))
        elif entry.has("dataset") and not entry.has("task"):
            dataset = entry.view("dataset")
            if dataset.has("localpath"):
                hint = "upload it first, with `distflow dataset upload`"
                dataset.add("`localpath` of a dataset is not supported", hint, key="localpath")
            _regex_finding(dataset)
            found.append(DataSpec(position=position, url="", dataset=_name(dataset), regex=_regex(entry, dataset)))
    return tuple(found)


def url_outputs(task: View) -> tuple[DataSpec, ...]:
    """Return the entries of ``outputs``. Add findings for invalid entries, and warnings for ignored keys."""
    found = []
    for position, entry in enumerate(task.views("outputs")):
        kind = next((key for key in ("url", "dataset", "update_dataset") if entry.has(key)), None)
        if kind == "url":
            found.append(_data(entry, position, writes=True))
            _regex_finding(entry)
        elif kind == "dataset":
            found.append(_output(entry, position))
        elif kind == "update_dataset":
            found.append(_update(entry, position))
        else:
            hint = "add a destination for the files in {{output}}, such as `url: s3://bucket/path`"
            entry.add("an entry of `outputs` needs `url`, `dataset` or `update_dataset`", hint)
    return tuple(found)


def checkpoints(task: View) -> tuple[CheckpointSpec, ...]:
    """Return the entries of ``checkpoint``. Add findings for invalid entries."""
    found = []
    for position, entry in enumerate(task.views("checkpoint")):
        path, data = entry.text("path"), _data(entry, position, writes=True)
        every_s = entry.parsed("frequency", parse_duration)
        _check_directory(entry, "path", path, "checkpoints")
        _check_frequency(entry, every_s)
        _regex_finding(entry)
        if path is not None and every_s is not None:
            found.append(CheckpointSpec(path=path, url=data.url, every_s=every_s, regex=data.regex))
    names = [normpath(one.path.value) for one in found]
    for position, name in enumerate(names):
        if name in names[:position]:
            task.add(f"two checkpoints have the path `{name}`", "keep one of them", key="checkpoint")
    return tuple(found)


def shared_directory(group: View) -> CheckpointSpec | None:
    """Return the directory that the tasks of a group share. Add a finding if it is invalid."""
    if not group.has("shared"):
        return None
    entry, key, every_s = group, "shared", None
    path = group.text("shared")
    if path is None:
        entry, key = group.view("shared"), "path"
        path = entry.text("path")
        every_s = entry.parsed("frequency", parse_duration)
        _check_frequency(entry, every_s)
    _check_directory(entry, key, path, "`shared`")
    return CheckpointSpec(path=path, url="", every_s=every_s or _SHARED_EVERY_S) if path is not None else None


def _check_directory(entry: View, key: str, path: Text | None, use: str) -> None:
    if path is not None and (".." in path.value.split("/") or normpath(path.value).strip("/") == ""):
        hint = "write a directory of the task, such as `/tmp/models`, or `.` for its working directory"
        entry.add(f"`{path.value}` is not a valid directory for {use}", hint, key=key)


def _check_frequency(entry: View, every_s: float | None) -> None:
    if every_s is not None and every_s < 1:
        entry.add("`frequency` is shorter than 1 s", "write the time between two copies, such as `5m`", key="frequency")


def _output(entry: View, position: int) -> DataSpec:
    dataset = entry.view("dataset")
    name, path = _name(dataset), dataset.string("path") or ""
    if ":" in name:
        message = f"`{name}` has a version, but an output always becomes a new version, with the next number"
        dataset.add(message, "remove the colon and the version", key="name")
    _check_path(dataset, "path", path)
    _warn_of_ignored_keys(dataset)
    _regex_finding(entry)
    _regex_finding(dataset)
    return DataSpec(position=position, url="", dataset=name, path=path.strip("/"), regex=_regex(entry, dataset))


def _update(entry: View, position: int) -> DataSpec:
    dataset = entry.view("update_dataset")
    paths = [one.value for one in dataset.texts("paths")]
    for path in paths:
        _check_path(dataset, "paths", path)
    _warn_of_ignored_keys(dataset)
    _regex_finding(entry)
    return DataSpec(
        position=position, url="", dataset=_name(dataset), is_update=True, paths=tuple(path.strip("/") for path in paths),
        regex=entry.string("regex") or "",
    )  # fmt: skip


def _check_path(dataset: View, key: str, path: str) -> None:
    if path.startswith("/") or ".." in path.split("/"):
        dataset.add(f"`{path}` is not inside the output directory", "write a path relative to {{output}}", key=key)


def _warn_of_ignored_keys(dataset: View) -> None:
    for key in ("metadata", "labels"):
        if dataset.has(key):
            dataset.warn(f"`{key}` of a dataset is ignored: distflow does not store it", "remove it", key=key)


def _name(dataset: View) -> str:
    name = dataset.string("name") or ""
    try:
        parse_dataset(name)
    except InputError as error:
        dataset.add(error.message, error.hint, key="name")
    return name


def _regex(entry: View, dataset: View) -> str:
    return entry.string("regex") or dataset.string("regex") or ""


def _data(entry: View, position: int, *, writes: bool) -> DataSpec:
    text = entry.string("url") or ""
    unsupported = next((one for one in find_tokens(text) if one.name != "workflow_id" or one.argument is not None), None)
    if unsupported is not None:
        shown = unsupported.name if unsupported.argument is None else f"{unsupported.name}:{unsupported.argument}"
        entry.add(
            f"`{{{{{shown}}}}}` is not replaced in a URL", "remove it; only `{{workflow_id}}` is replaced there", key="url"
        )
    else:
        try:
            parse_url(text, writes=writes)
        except InputError as error:
            entry.add(error.message, error.hint, key="url")
    return DataSpec(position=position, url=text, regex=entry.string("regex") or "")


# -- inputs from tasks, and the order of groups -----------------------------------------------------------------------


class _Location(Struct, frozen=True, kw_only=True):
    """The group of an entry of ``tasks``, or of one of its replicas."""

    group: int
    """The position of its group in the file."""
    replicas: tuple[str, ...] = ()
    """The names of its replicas. An entry with replicas is not a task itself."""


class Graph:
    """All groups of a spec with their tasks, and the dependencies between groups."""

    def __init__(self, groups: Sequence[tuple[str, Sequence[tuple[View, Sequence[str]]]]]) -> None:
        """Read the names and inputs of all tasks.

        Each group is a pair of a name (of the group, or of its only task) and its entries of ``tasks``. Each entry comes with
        the names of the tasks that it stands for: several with ``replicas``, otherwise one.
        """
        self._names = [name for name, _ in groups]
        self._locations: dict[str, _Location] = {}
        for position, (_, tasks) in enumerate(groups):
            for task, names in tasks:
                written = task.string("name") or ""
                self._locations[written] = _Location(group=position, replicas=tuple(names) if task.has("replicas") else ())
                self._locations |= {name: _Location(group=position) for name in names if name != written}
        self._dependencies = [
            {self._locations[name].group for task, _ in tasks for name in self._named(task)} for _, tasks in groups
        ]

    def _named(self, task: View) -> Iterator[str]:
        for entry in task.views("inputs"):
            name = entry.string("task")
            if name is not None and name in self._locations:
                yield name

    def inputs(self, task: View, group: int) -> tuple[InputSpec, ...]:
        """Return the inputs that an entry of ``tasks`` gets from tasks of this workflow. Add findings for invalid inputs."""
        found = []
        for position, entry in enumerate(task.views("inputs")):
            what = next((key for key in ("task", "url", "dataset") if entry.has(key)), None)
            regex = entry.string("regex") or ""
            if what is None:
                entry.add("an entry of `inputs` needs `task`, `url` or `dataset`", "add one of these keys")
            elif what == "task" and not _is_earlier(entry.string("task") or ""):
                self._check(entry, task, group)
                found.append(InputSpec(position=position, task=entry.string("task") or "", regex=regex))
            _regex_finding(entry)
        return tuple(found)

    def _check(self, entry: View, task: View, group: int) -> None:
        name = entry.string("task") or ""
        location, own = self._locations.get(name), task.string("name") or ""
        message, hint = "", ""
        if ":" in name:
            message, hint = f"`{name}` does not name a task", "write `<workflow id>:<task>`, such as `train-7:prepare`"
        elif location is None and name in self._names:
            locations = self._locations.items()
            at = self._names.index(name)
            tasks = (task_name for task_name, one in locations if task_name and one.group == at and not one.replicas)
            message, hint = f"`{name}` is a group, not a task", f"write one of its tasks, such as `{next(tasks, '')}`"
        elif location is None:
            message, hint = f"there is no task `{name}`", did_you_mean(name, self._locations, what="tasks")
        elif location.group == group and name == own:
            message, hint = f"the task `{name}` cannot be its own input", "remove this entry"
        elif location.group == group:
            message = f"`{name}` is in the same group as `{own}`, and tasks of a group run at the same time"
            hint = f"put `{name}` into a separate group, before `{self._names[group]}`"
        elif location.replicas:
            message, hint = (
                f"`{name}` has replicas, but an input is from one task",
                f"write an entry for each replica that is needed, such as `{location.replicas[0]}`",
            )
        elif location.group > group:
            message, hint = self._later(location.group, group)
        if message:
            entry.add(message, hint, key="task")

    def _later(self, later: int, group: int) -> tuple[str, str]:
        path = self._path(later, group)
        if path:
            steps = [f"`{self._names[step]}`" for step in (group, *path)]
            return (
                f"the groups wait in a cycle: {steps[0]} waits for {', which waits for '.join(steps[1:])}",
                "remove one of the `inputs` that cause the cycle",
            )
        name, own = self._names[later], self._names[group]
        return f"`{own}` must wait for `{name}`, which comes later in the file", f"move `{name}` before `{own}`"

    def _path(self, start: int, goal: int) -> list[int]:
        """Return the groups on a shortest path of dependencies, with both ends; empty if there is no path."""
        came_from: dict[int, int | None] = {start: None}
        queue = [start]
        while queue and goal not in came_from:
            here = queue.pop(0)
            for following in sorted(self._dependencies[here] - set(came_from)):
                came_from[following] = here
                queue.append(following)
        path: list[int] = []
        step: int | None = goal if goal in came_from else None
        while step is not None:
            path.insert(0, step)
            step = came_from[step]
        return path


def upstream_of(tasks: Sequence[TaskSpec], group_of: Mapping[str, str]) -> tuple[str, ...]:
    """Return the groups whose outputs a group uses, in the order of the file. ``group_of`` has the group of each task."""
    wanted = {group_of.get(one.task) for task in tasks for one in task.inputs}
    return tuple(group for group in dict.fromkeys(group_of.values()) if group in wanted)


def _regex_finding(entry: View) -> None:
    """Add a finding for an invalid ``regex``."""
    regex = entry.string("regex") or ""
    if _regex_error(regex):
        hint = r"use Python's syntax, such as `.*\.pt`; the expression is matched from the start of the relative path"
        entry.add(f"`{regex}` is not a valid regular expression: {_regex_error(regex)}", hint, key="regex")


def _regex_error(text: str) -> str:
    """Return why a text is not a valid regular expression; empty if it is valid."""
    try:
        re.compile(text)
    except (re.error, OverflowError, RecursionError) as error:
        return str(error)
    return ""


_EARLIER_TASK = re.compile(r"([A-Za-z][A-Za-z0-9_-]*-[0-9]+|[0-9a-f]{32}):([A-Za-z][A-Za-z0-9_-]*)")


def _is_earlier(name: str) -> bool:
    """Return whether an input names a task of another workflow, such as ``train-7:prepare``."""
    return _EARLIER_TASK.fullmatch(name) is not None


def earlier_inputs(task: View) -> tuple[EarlierInput, ...]:
    """Return the entries of ``inputs`` that name tasks of earlier workflows; their existence is checked later."""
    found = []
    for position, entry in enumerate(task.views("inputs")):
        match = _EARLIER_TASK.fullmatch(entry.string("task") or "")
        if match is not None:
            mark = entry.key_mark("task")
            regex = entry.string("regex") or ""
            found.append(EarlierInput(position=position, workflow=match[1], task=match[2], regex=regex, mark=mark))
    return tuple(found)
