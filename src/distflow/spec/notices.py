"""What OSMO's language has and this version does not do: findings that say so before anything runs.

A key whose absence would change what the tasks compute is an error; one that would only do more at the edges is a warning
that names what will not happen.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from distflow.documents.view import View

__all__ = ["notice_task", "output_words"]

_TASK_WARNINGS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "downloadType": ("`downloadType` is ignored", ""),
        "cacheSize": ("`cacheSize` is ignored", ""),
        "kpis": ("`kpis` is ignored: nothing is uploaded", "write them to a URL, with `outputs`"),
    }
)


def notice_task(task: View) -> None:
    """Find what this version does not do for a task."""
    for key, (message, hint) in _TASK_WARNINGS.items():
        if task.has(key):
            task.warn(message, hint, key=key)


def output_words(task: View) -> tuple[str, ...]:
    """Return in words what the spec wants done with the task's output."""
    words = []
    for entry in task.views("outputs"):
        for key, verb in (("url", "upload to"), ("dataset", "store as dataset"), ("update_dataset", "add to dataset")):
            what = entry.string(key) or entry.view(key).string("name")
            if what:
                words.append(f"{verb} {what}")
    return tuple(words)
