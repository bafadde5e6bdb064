"""``inputs`` and ``outputs`` at URLs: what a task takes from a store, and writes to one when it has completed."""

from __future__ import annotations

from distflow.documents.quantities import parse_duration
from distflow.documents.urls import parse_url
from distflow.documents.view import View
from distflow.errors import InputError
from distflow.spec.inputs import regex_finding
from distflow.spec.model import CheckpointSpec, DataSpec
from distflow.spec.tokens import find_tokens

__all__ = ["checkpoints", "url_inputs", "url_outputs"]


def url_inputs(task: View) -> tuple[DataSpec, ...]:
    """Return the entries of ``inputs`` that name a URL; finds those that cannot be. The others are looked at elsewhere."""
    entries = [(position, entry) for position, entry in enumerate(task.views("inputs")) if _is_by_url(entry)]
    return tuple(_data(entry, position, writes=False) for position, entry in entries)


def url_outputs(task: View) -> tuple[DataSpec, ...]:
    """Return the entries of ``outputs`` that name a URL; finds those that cannot be, and tells of what is not done."""
    found = []
    for position, entry in enumerate(task.views("outputs")):
        kind = next((key for key in ("url", "dataset", "update_dataset") if entry.has(key)), None)
        if kind == "url":
            found.append(_data(entry, position, writes=True))
            regex_finding(entry)
        elif kind is None:
            entry.add("an entry of `outputs` needs `url`", "say where to write what the task leaves in {{output}}")
        else:
            words = f"`outputs` by {kind} is not stored yet: the files stay on the node, below the task's output directory"
            entry.warn(words, "`distflow workflow query` says where; `url` writes them to a store", key=kind)
    return tuple(found)


def checkpoints(task: View) -> tuple[CheckpointSpec, ...]:
    """Return the entries of ``checkpoint``; finds those that cannot be."""
    found = []
    for position, entry in enumerate(task.views("checkpoint")):
        path, data = entry.text("path"), _data(entry, position, writes=True)
        every_s = entry.parsed("frequency", parse_duration)
        if path is not None and (".." in path.value.split("/") or not path.value.strip("/.")):
            entry.add(
                f"`{path.value}` cannot be a checkpoint", "name a directory of the task, such as `/tmp/models`", key="path"
            )
        if every_s is not None and every_s < 1:
            entry.add("`frequency` is shorter than a second", "write how often, such as `5m`", key="frequency")
        regex_finding(entry)
        if path is not None and every_s is not None:
            found.append(CheckpointSpec(path=path, url=data.url, every_s=every_s, regex=data.regex))
    names = [one.path.value.rstrip("/") for one in found]
    for position, name in enumerate(names):
        if name in names[:position]:
            task.add(f"two checkpoints have the path `{name}`", "write one of them", key="checkpoint")
    return tuple(found)


def _is_by_url(entry: View) -> bool:
    return entry.has("url") and not entry.has("task")


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
