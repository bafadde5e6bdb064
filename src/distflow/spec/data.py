"""``inputs`` and ``outputs`` at URLs and in datasets, and ``checkpoint`` and ``shared`` directories."""

from __future__ import annotations

from posixpath import normpath

from distflow.documents.document import Text, View
from distflow.documents.quantities import parse_duration
from distflow.documents.urls import parse_dataset, parse_url
from distflow.errors import InputError
from distflow.spec.inputs import regex_finding
from distflow.spec.model import CheckpointSpec, DataSpec
from distflow.spec.tokens import find_tokens

__all__ = ["checkpoints", "shared_directory", "url_inputs", "url_outputs"]

_SHARED_EVERY_S = 300.0


def url_inputs(task: View) -> tuple[DataSpec, ...]:
    """Return the entries of ``inputs`` that name a URL or a dataset; add findings for invalid ones."""
    found = []
    for position, entry in enumerate(task.views("inputs")):
        if entry.has("url") and not entry.has("task"):
            found.append(_data(entry, position, writes=False))
        elif entry.has("dataset") and not entry.has("task"):
            dataset = entry.view("dataset")
            if dataset.has("localpath"):
                hint = "upload it first, with `distflow dataset upload`"
                dataset.add("not supported: `localpath` of a dataset", hint, key="localpath")
            regex_finding(dataset)
            found.append(DataSpec(position=position, url="", dataset=_name(dataset), regex=_regex(entry, dataset)))
    return tuple(found)


def url_outputs(task: View) -> tuple[DataSpec, ...]:
    """Return the entries of ``outputs``; add findings for invalid ones, and warnings for ignored keys."""
    found = []
    for position, entry in enumerate(task.views("outputs")):
        kind = next((key for key in ("url", "dataset", "update_dataset") if entry.has(key)), None)
        if kind == "url":
            found.append(_data(entry, position, writes=True))
            regex_finding(entry)
        elif kind == "dataset":
            found.append(_output(entry, position))
        elif kind == "update_dataset":
            found.append(_update(entry, position))
        else:
            hint = "say where to write what the task leaves in {{output}}"
            entry.add("an entry of `outputs` needs `url`, `dataset` or `update_dataset`", hint)
    return tuple(found)


def checkpoints(task: View) -> tuple[CheckpointSpec, ...]:
    """Return the entries of ``checkpoint``; add findings for invalid ones."""
    found = []
    for position, entry in enumerate(task.views("checkpoint")):
        path, data = entry.text("path"), _data(entry, position, writes=True)
        every_s = entry.parsed("frequency", parse_duration)
        _check_directory(entry, "path", path)
        _check_frequency(entry, every_s)
        regex_finding(entry)
        if path is not None and every_s is not None:
            found.append(CheckpointSpec(path=path, url=data.url, every_s=every_s, regex=data.regex))
    names = [normpath(one.path.value) for one in found]
    for position, name in enumerate(names):
        if name in names[:position]:
            task.add(f"two checkpoints have the path `{name}`", "write one of them", key="checkpoint")
    return tuple(found)


def shared_directory(group: View) -> CheckpointSpec | None:
    """Return the directory that the tasks of a group share; add a finding if it is invalid."""
    if not group.has("shared"):
        return None
    entry, key, every_s = group, "shared", None
    path = group.text("shared")
    if path is None:
        entry, key = group.view("shared"), "path"
        path = entry.text("path")
        every_s = entry.parsed("frequency", parse_duration)
        _check_frequency(entry, every_s)
    _check_directory(entry, key, path)
    return CheckpointSpec(path=path, url="", every_s=every_s or _SHARED_EVERY_S) if path is not None else None


def _check_directory(entry: View, key: str, path: Text | None) -> None:
    if path is not None and (".." in path.value.split("/") or normpath(path.value).strip("/") == ""):
        hint = "name a directory of the task, such as `/tmp/models`, or `.` for its working directory"
        entry.add(f"`{path.value}` cannot be a checkpoint", hint, key=key)


def _check_frequency(entry: View, every_s: float | None) -> None:
    if every_s is not None and every_s < 1:
        entry.add("`frequency` is shorter than a second", "write how often, such as `5m`", key="frequency")


def _output(entry: View, position: int) -> DataSpec:
    dataset = entry.view("dataset")
    name, path = _name(dataset), dataset.string("path") or ""
    if ":" in name:
        words = f"`{name}` names a version: what is written becomes a new one, with the next number"
        dataset.add(words, "leave the colon and what follows out", key="name")
    _check_path(dataset, "path", path)
    _warn_of_notes(dataset)
    regex_finding(entry)
    regex_finding(dataset)
    return DataSpec(position=position, url="", dataset=name, path=path.strip("/"), regex=_regex(entry, dataset))


def _update(entry: View, position: int) -> DataSpec:
    dataset = entry.view("update_dataset")
    paths = [one.value for one in dataset.texts("paths")]
    for path in paths:
        _check_path(dataset, "paths", path)
    _warn_of_notes(dataset)
    regex_finding(entry)
    return DataSpec(
        position=position, url="", dataset=_name(dataset), is_update=True, paths=tuple(path.strip("/") for path in paths),
        regex=entry.string("regex") or "",
    )  # fmt: skip


def _check_path(dataset: View, key: str, path: str) -> None:
    if path.startswith("/") or ".." in path.split("/"):
        dataset.add(f"`{path}` does not lie in the output", "write a path relative to {{output}}", key=key)


def _warn_of_notes(dataset: View) -> None:
    for key in ("metadata", "labels"):
        if dataset.has(key):
            dataset.warn(f"`{key}` of a dataset is ignored", key=key)


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
    strange = next((token for token in find_tokens(text) if token.name != "workflow_id" or token.argument is not None), None)
    if strange is not None:
        shown = strange.name if strange.argument is None else f"{strange.name}:{strange.argument}"
        entry.add(f"{{{{{shown}}}}} is not filled in in a URL", "only {{workflow_id}} is", key="url")
    else:
        try:
            parse_url(text, writes=writes)
        except InputError as error:
            entry.add(error.message, error.hint, key="url")
    return DataSpec(position=position, url=text, regex=entry.string("regex") or "")
