"""What a task wrote to its error file, as ``distflow workflow logs --error`` shows it."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping

from distflow.documents.printable import plain
from distflow.protocol.error_file import parse_error_file
from distflow.state.record import TaskRecord, WorkflowRecord

__all__ = ["error_text", "show_errors"]


def show_errors(record: WorkflowRecord, group: str, task: str, attempt: int | None, *, as_json: bool) -> None:
    """Show the error files of a task's attempts (of one, or of all), and say where the rest of its output is."""
    there = [one for one in record.group(group).attempts if one.name == task and attempt in (None, one.attempt)]
    attempts = sorted(there, key=lambda one: one.attempt)
    if as_json:
        shown = [{"task": one.name, "retry_id": one.attempt, "error": _error(one)} for one in attempts]
        print(json.dumps(shown, indent=2))
        return
    found = [(one, error) for one in attempts if (error := _error(one)) is not None]
    for one, error in found:
        for line in error_text(error).splitlines():
            print(f"[{task}{f' retry-{one.attempt}' if one.attempt else ''}] {plain(line)}")
    if not found:
        has_ended = bool(attempts) and all(one.state.is_final for one in attempts)
        print(
            f"{task} wrote no error file{'' if has_ended else ' yet'}; what it printed, standard error too: "
            f"distflow workflow logs {record.id} --task {task}",
            file=sys.stderr,
        )


def error_text(error: Mapping[str, object]) -> str:
    """Return the error file in torch's format as text: the message, then the stack; any other one as JSON."""
    report = parse_error_file(error)
    if report is None:
        return json.dumps(error, indent=2)
    return f"{report.message}\n{report.callstack}" if report.callstack else report.message


def _error(task: TaskRecord) -> Mapping[str, object] | None:
    return task.end.error if task.end is not None else None
