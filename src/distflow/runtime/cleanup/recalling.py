"""Workflows on this node that a submitter does not know: its notes on them, and the status of their attempts."""

from __future__ import annotations

import os
from typing import List, Tuple

from distflow.runtime.files import attempts
from distflow.runtime.files.attempt_files import MEMO
from distflow.runtime.wire import Json

__all__ = ["recall"]


def recall(root: str, request: Json) -> Json:
    """Return every workflow except ``known`` ones: its attempts, and the newest note that is stored with one of them."""
    known = set(request.get("known") or [])
    return {"workflows": [_workflow(root, uuid) for uuid in attempts.workflows(root) if uuid not in known]}


def _workflow(root: str, uuid: str) -> Json:
    found = []
    notes: List[Tuple[int, str]] = []
    for name, directory in attempts.each(root, uuid):
        status = attempts.read_status(directory)
        found.append({
            "attempt": name, "phase": status["phase"], "pid": status["pid"], "started_at": status["started_at"],
            "directory": directory,
        })  # fmt: skip
        path = os.path.join(directory, MEMO)
        try:
            notes.append((os.stat(path).st_mtime_ns, path))
        except OSError:
            continue
    return {"uuid": uuid, "attempts": found, "memo": _newest(notes)}


def _newest(notes: List[Tuple[int, str]]) -> str:
    for _, path in sorted(notes, reverse=True):
        try:
            with open(path, encoding="utf-8") as file:
                return file.read()
        except (OSError, ValueError):
            continue
    return ""
