"""``inputs: - task: <workflow>:<task>``: what a task of an earlier workflow wrote, in OSMO's form."""

from __future__ import annotations

import re

from distflow.documents.view import View
from distflow.spec.model import EarlierInput

__all__ = ["earlier_inputs", "is_earlier"]

_FORM = re.compile(r"([A-Za-z][A-Za-z0-9_-]*-[0-9]+|[0-9a-f]{32}):([A-Za-z][A-Za-z0-9_-]*)")


def is_earlier(name: str) -> bool:
    """Whether an input names a task of another workflow, such as ``train-7:prepare``."""
    return _FORM.fullmatch(name) is not None


def earlier_inputs(task: View) -> tuple[EarlierInput, ...]:
    """Return the entries of ``inputs`` that name tasks of earlier workflows; whether those are there is looked at elsewhere."""
    found = []
    for position, entry in enumerate(task.views("inputs")):
        match = _FORM.fullmatch(entry.string("task") or "")
        if match is not None:
            mark = entry.key_mark("task")
            regex = entry.string("regex") or ""
            found.append(EarlierInput(position=position, workflow=match[1], task=match[2], regex=regex, mark=mark))
    return tuple(found)
