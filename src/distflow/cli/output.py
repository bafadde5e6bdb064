"""The output of tasks, for whoever shows it: where it lies, what stands before its lines, and what of it is not here."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import TYPE_CHECKING

from distflow.cli import wiring
from distflow.cli.tables import Paint
from distflow.state.logs import LogLine, LogSource, mirrored_bytes

if TYPE_CHECKING:
    from distflow.state.directory import StateDirectory
    from distflow.state.record import TaskRecord, WorkflowRecord

__all__ = ["Prefixes", "log_sources", "what_is_missing"]


def log_sources(
    directory: StateDirectory, record: WorkflowRecord, tasks: Collection[tuple[str, TaskRecord]], attempt: int | None = None
) -> list[LogSource]:
    """Return where the logs of these tasks lie: of one attempt, or of all there were."""
    mirror = wiring.mirror(directory)
    return [
        LogSource(task.name, number, mirror.folder(record.uuid, group, task.name, number))
        for group, task in tasks
        for number in (range(task.attempt + 1) if attempt is None else (attempt,))
    ]


class Prefixes:
    """``[task] ``, or ``[task retry-1] ``, in the task's colour."""

    def __init__(self, tasks: Iterable[TaskRecord], paint: Paint, *, enabled: bool = True) -> None:
        """Give each task a colour of its own."""
        self._numbers = {task.name: number for number, task in enumerate(tasks)}
        self._paint = paint
        self._enabled = enabled
        self._made: dict[tuple[str, int], str] = {}

    def of(self, line: LogLine) -> str:
        """Return what stands before a line; nothing when there are to be none."""
        if not self._enabled:
            return ""
        made = self._made.get((line.task, line.attempt))
        if made is None:
            retry = f" retry-{line.attempt}" if line.attempt else ""
            made = self._paint.task(f"[{line.task}{retry}]", self._numbers.get(line.task, 0)) + " "
            self._made[line.task, line.attempt] = made
        return made


def what_is_missing(
    directory: StateDirectory, record: WorkflowRecord, tasks: Collection[str], attempt: int | None = None
) -> Iterator[str]:
    """Yield one sentence for each of the tasks that ended and whose output is not all here."""
    for group in record.groups:
        for task in group.attempts:
            if task.name not in tasks or task.end is None or attempt not in (None, task.attempt):
                continue
            here = sum(mirrored_bytes(source) for source in log_sources(directory, record, [(group.name, task)], task.attempt))
            missing = task.end.output_bytes - here
            if missing > 0 and task.log_complete:
                yield f"{task.name}: the last {missing:,} bytes of its output never came from {task.node}"
            elif missing > 0:
                yield f"{task.name}: {missing:,} bytes of its output are still on {task.node}"
            if task.end.lost_output_bytes:
                yield f"{task.name}: {task.end.lost_output_bytes:,} bytes of its output were lost: {task.node}'s disk was full"
