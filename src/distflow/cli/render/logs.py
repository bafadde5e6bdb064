"""Print the output of tasks, with the task's name as a prefix of each line, and error files."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from distflow.cli.render.tables import Paint
from distflow.documents.text import plain
from distflow.protocol.error_file import parse_error_file
from distflow.state.record import TaskRecord, WorkflowRecord

if TYPE_CHECKING:
    from distflow.client.logs import LogLine
    from distflow.state.record import TaskRecord


__all__ = [
    "Prefixes",
    "error_text",
    "show_errors",
]


class Prefixes:
    """Prefixes of log lines: ``[task] ``, or ``[task retry-1 rank 3] `` if the rank is known, in the task's color."""

    def __init__(self, tasks: Iterable[TaskRecord], paint: Paint, *, enabled: bool = True) -> None:
        """Assign a color to each task."""
        self._numbers = {task.name: number for number, task in enumerate(tasks)}
        self._paint = paint
        self._enabled = enabled
        self._made: dict[tuple[str, int, int | None], str] = {}

    def of(self, line: LogLine) -> str:
        """Return the prefix of a line, or an empty text if prefixes are disabled."""
        if not self._enabled:
            return ""
        key = line.task, line.attempt, line.rank
        made = self._made.get(key)
        if made is None:
            retry = f" retry-{line.attempt}" if line.attempt else ""
            rank = "" if line.rank is None else f" rank {line.rank}"
            made = self._paint.task(f"[{line.task}{retry}{rank}]", self._numbers.get(line.task, 0)) + " "
            self._made[key] = made
        return made


def show_errors(record: WorkflowRecord, group: str, task: str, attempt: int | None, *, as_json: bool) -> None:
    """Print the error files of one or all attempts of a task. If there are none, print the command that shows its output."""
    chosen = [one for one in record.group(group).attempts if one.name == task and attempt in (None, one.attempt)]
    attempts = sorted(chosen, key=lambda one: one.attempt)
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
    """Return an error file as text: message and call stack if it has torch's format, JSON otherwise."""
    report = parse_error_file(error)
    if report is None:
        return json.dumps(error, indent=2)
    return f"{report.message}\n{report.callstack}" if report.callstack else report.message


def _error(task: TaskRecord) -> Mapping[str, object] | None:
    return task.end.error if task.end is not None else None
