"""The names of tasks in front of the lines that they print."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from distflow.cli.tables import Paint

if TYPE_CHECKING:
    from distflow.client.logs import LogLine
    from distflow.state.record import TaskRecord

__all__ = ["Prefixes"]


class Prefixes:
    """``[task] ``, or ``[task retry-1 rank 3] `` where the rank is known, in the task's color."""

    def __init__(self, tasks: Iterable[TaskRecord], paint: Paint, *, enabled: bool = True) -> None:
        """Give each task a colour of its own."""
        self._numbers = {task.name: number for number, task in enumerate(tasks)}
        self._paint = paint
        self._enabled = enabled
        self._made: dict[tuple[str, int, int | None], str] = {}

    def of(self, line: LogLine) -> str:
        """Return what stands before a line; nothing when there are to be none."""
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
