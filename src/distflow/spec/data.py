"""``inputs`` and ``outputs`` at URLs: what a task takes from a store, and writes to one when it has completed."""

from __future__ import annotations

from distflow.documents.urls import parse_url
from distflow.documents.view import View
from distflow.errors import InputError
from distflow.spec.inputs import regex_finding
from distflow.spec.model import DataSpec
from distflow.spec.tokens import find_tokens

__all__ = ["url_inputs", "url_outputs"]


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
