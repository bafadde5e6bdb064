"""The output of tasks, for whoever shows it: where it lies, what stands before its lines, and what of it is not here."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from distflow.cli import wiring
from distflow.cli.tables import Paint
from distflow.state.logs import Keep, LogLine, LogSource, mirrored_bytes, tells_ranks

if TYPE_CHECKING:
    from distflow.state.directory import StateDirectory
    from distflow.state.record import TaskRecord, WorkflowRecord

__all__ = ["Prefixes", "RankChoice", "lines_of_ranks", "log_sources", "what_is_missing"]

_NAMED = re.compile(r"\[(?:rank ?(\d+)|default(\d+))\]", re.IGNORECASE)


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


def lines_of_ranks(sources: Collection[LogSource], chosen: Mapping[str, RankChoice], *, follow: bool) -> Keep:
    """Return which lines are those of the chosen ranks.

    Lines of no rank count where their task holds no other rank than those, or where its ranks are not told apart at all.
    """
    untold: dict[tuple[str, int], bool] = {}

    def is_untold(line: LogLine) -> bool:
        key = line.task, line.attempt
        if key not in untold:
            own = (one for one in sources if (one.task, one.attempt) == key)
            untold[key] = not follow and not any(tells_ranks(one) for one in own)
        return untold[key]

    def keep(line: LogLine) -> bool:
        choice = chosen.get(line.task)
        if choice is None or line.dropped or choice.has_all:
            return True
        rank = line.rank if line.rank is not None else choice.named(line.text)
        return rank in choice.ranks if rank is not None else is_untold(line)

    return keep


@dataclass(frozen=True, slots=True)
class RankChoice:
    """Which ranks of a task are wanted."""

    held: range
    """All that it holds."""
    ranks: frozenset[int]

    @property
    def has_all(self) -> bool:
        """Whether nothing of the task is unwanted."""
        return self.ranks.issuperset(self.held)

    def named(self, text: str) -> int | None:
        """Return the rank that a line names at its beginning, as torch and torchrun's ``--tee`` do."""
        match = _NAMED.match(text)
        if match is None:
            return None
        rank = int(match[1]) if match[1] else self.held.start + int(match[2])
        return rank if rank in self.held else None


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
