"""The output of tasks: where it lies, reading and following it, and what of it is not here."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from distflow.client.client import Client
from distflow.client.workflows import held_ranks, pause
from distflow.state.logs import POLL_S, Keep, LogLine, LogSource, follow_lines, mirrored_bytes, read_lines, tells_ranks

if TYPE_CHECKING:
    from distflow.state.record import TaskRecord, WorkflowRecord

__all__ = ["LogLine", "LogStream", "Wait", "WorkflowWatch", "log_sources", "missing_output", "stream_logs"]

_NAMED = re.compile(r"\[(?:rank ?(\d+)|default(\d+))\]", re.IGNORECASE)
_WAKE_EVERY = 30
"""Polls of the store between two checks that a supervisor is running."""
_PATIENCE_S = 10.0
"""How long logs may stand still after the workflow's end before it is taken that the rest will not come."""

Tasks = Sequence[tuple[str, "TaskRecord"]]
"""Tasks, each with the name of its group."""
Wait = Callable[[float], object]


def log_sources(
    client: Client, record: WorkflowRecord, tasks: Iterable[tuple[str, TaskRecord]], attempt: int | None = None
) -> list[LogSource]:
    """Return where the logs of these tasks lie: of one attempt, or of all there were."""
    mirror = client.mirror
    return [
        LogSource(task.name, number, mirror.folder(record.uuid, group, task.name, number))
        for group, task in tasks
        for number in (range(task.attempt + 1) if attempt is None else (attempt,))
    ]


class WorkflowWatch:
    """A workflow's record as it changes, and whether its logs have come to their end."""

    def __init__(self, client: Client, record: WorkflowRecord, *, tasks: Collection[str] | None = None) -> None:
        """Watch a workflow; ``tasks`` are those whose logs matter, ``None``: all."""
        self.record = record
        self._client = client
        self._tasks = tasks
        self._polls = 0
        self._refreshes = 0
        self._still_since = 0
        self._bytes_here = -1

    def refresh(self) -> WorkflowRecord:
        """Return the record as it is now; now and then see to it that a supervisor runs."""
        self.record = self._client.store.find(self.record.uuid)
        self._refreshes += 1
        if self._refreshes % _WAKE_EVERY == 0:
            self._client.wake()
        return self.record

    def logs_are_over(self) -> bool:
        """Return whether the workflow has ended and its logs are here, or stand still; to be asked every ``POLL_S``."""
        self.refresh()
        self._polls += 1
        if not self.record.state.is_final:
            return False
        tasks = self._wanted()
        if all(task.log_complete for _, task in tasks):
            return True
        here = sum(mirrored_bytes(source) for source in log_sources(self._client, self.record, tasks))
        if here != self._bytes_here:
            self._bytes_here, self._still_since = here, self._polls
        return (self._polls - self._still_since) * POLL_S >= _PATIENCE_S

    def sources(self, attempt: int | None = None) -> list[LogSource]:
        """Return the logs that there are, or will be."""
        return log_sources(self._client, self.record, self._wanted(), attempt)

    def lines(
        self,
        *,
        attempt: int | None = None,
        last: int | None = None,
        keep: Keep | None = None,
        wait: Wait = pause,
        on_poll: Callable[[WorkflowRecord], None] = lambda _: None,
    ) -> Iterator[LogLine]:
        """Yield lines as they come, merged by time, until the workflow has ended and its logs are complete.

        Args:
            attempt: Only of this attempt of each task.
            last: Begin with so many of the lines that are there.
            keep: Which lines are wanted.
            wait: Called with the seconds to wait, when there is nothing new.
            on_poll: Called with the record each time it was read again.

        """

        def is_over() -> bool:
            over = self.logs_are_over()
            on_poll(self.record)
            return over

        return follow_lines(lambda: self.sources(attempt), wait=wait, is_over=is_over, last=last, keep=keep)

    def _wanted(self) -> list[tuple[str, TaskRecord]]:
        return [
            (group.name, task)
            for group in self.record.groups
            for task in group.tasks
            if self._tasks is None or task.name in self._tasks
        ]


class LogStream:
    """Lines of tasks, merged by time: an iterator to be read once, and remarks about it afterwards."""

    def __init__(self, lines: Iterator[LogLine], remarks: Callable[[], Iterator[str]]) -> None:
        """Read nothing yet."""
        self._lines = lines
        self._remarks = remarks

    def __iter__(self) -> Iterator[LogLine]:
        """Yield the lines."""
        return self._lines

    def remarks(self) -> Iterator[str]:
        """Yield sentences about what is missing of the output, and about ranks that could not be chosen."""
        return self._remarks()


def stream_logs(
    client: Client,
    record: WorkflowRecord,
    tasks: Tasks,
    *,
    names: Collection[str] = (),
    ranks: Collection[int] = (),
    attempt: int | None = None,
    last: int | None = None,
    follow: bool = False,
    wait: Wait = pause,
) -> LogStream:
    """Return the lines that tasks printed; also after their end, and when their nodes are gone.

    Args:
        client: Where the workflow is known.
        record: The workflow.
        tasks: Which of its tasks (see ``choose_tasks``).
        names: Those of them that are wanted with all their ranks.
        ranks: The ranks that are wanted of the others; all when empty.
        attempt: Only of this attempt, counted from 0; else of all.
        last: Begin with so many of the lines that are there.
        follow: Whether to go on until the workflow has ended and its logs are complete.
        wait: Called with the seconds to wait, when there is nothing new.

    """
    sources = log_sources(client, record, tasks, attempt)
    chosen = _chosen_ranks(tasks, names, ranks)
    keep = _lines_of_ranks(sources, chosen, follow=follow) if chosen else None
    watch = WorkflowWatch(client, record, tasks={one.name for _, one in tasks})
    if follow:
        lines = watch.lines(attempt=attempt, last=last, keep=keep, wait=wait)
    else:
        lines = read_lines(sources, last=last, keep=keep)

    def remarks() -> Iterator[str]:
        yield from missing_output(client, watch.record, {one.name for _, one in tasks}, attempt)
        yield from _not_told_apart(sources, chosen)

    return LogStream(lines, remarks)


def missing_output(client: Client, record: WorkflowRecord, tasks: Collection[str], attempt: int | None = None) -> Iterator[str]:
    """Yield one sentence for each of the tasks that ended and whose output is not all here."""
    for group in record.groups:
        for task in group.attempts:
            if task.name not in tasks or task.end is None or attempt not in (None, task.attempt):
                continue
            here = sum(mirrored_bytes(source) for source in log_sources(client, record, [(group.name, task)], task.attempt))
            missing = task.end.output_bytes - here
            if missing > 0 and task.log_complete:
                yield f"{task.name}: the last {missing:,} bytes of its output never came from {task.node}"
            elif missing > 0:
                yield f"{task.name}: {missing:,} bytes of its output are still on {task.node}"
            if task.end.lost_output_bytes:
                yield f"{task.name}: {task.end.lost_output_bytes:,} bytes of its output were lost: {task.node}'s disk was full"


@dataclass(frozen=True, slots=True)
class _RankChoice:
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


def _chosen_ranks(tasks: Tasks, names: Collection[str], ranks: Collection[int]) -> dict[str, _RankChoice]:
    """Return which ranks are wanted of tasks of which not everything is."""
    choices = {
        one.name: _RankChoice(held=held_ranks(one.ranks), ranks=frozenset(ranks))
        for _, one in tasks
        if ranks and one.name not in names
    }
    return {name: choice for name, choice in choices.items() if not choice.has_all}


def _lines_of_ranks(sources: Collection[LogSource], chosen: Mapping[str, _RankChoice], *, follow: bool) -> Keep:
    """Return which lines are those of the chosen ranks.

    Lines of no rank count where their task holds no other rank than those, or where its ranks are not told apart at all.
    """
    unlabeled: dict[tuple[str, int], bool] = {}

    def is_unlabeled(line: LogLine) -> bool:
        key = line.task, line.attempt
        if key not in unlabeled:
            own = (one for one in sources if (one.task, one.attempt) == key)
            unlabeled[key] = not follow and not any(tells_ranks(one) for one in own)
        return unlabeled[key]

    def keep(line: LogLine) -> bool:
        choice = chosen.get(line.task)
        if choice is None or line.dropped or choice.has_all:
            return True
        rank = line.rank if line.rank is not None else choice.named(line.text)
        return rank in choice.ranks if rank is not None else is_unlabeled(line)

    return keep


def _not_told_apart(sources: Sequence[LogSource], chosen: Mapping[str, _RankChoice]) -> Iterator[str]:
    """Yield one sentence for each task of which ranks were asked for, and whose ranks share one output."""
    for name in chosen:
        own = [one for one in sources if one.task == name and mirrored_bytes(one)]
        if own and not any(tells_ranks(one) for one in own):
            yield f"{name}: its ranks share one output, so `--rank` cannot choose; torchrun and `spawn` give each its own"
