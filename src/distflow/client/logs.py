"""Read and follow the output of tasks, and report missing output."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from msgspec import Struct

from distflow.client.client import Client
from distflow.client.workflows import held_ranks, pause
from distflow.documents.quantities import count_text
from distflow.documents.text import few, plain_lines
from distflow.state.logs import POLL_S, Keep, LogLine, LogSource, follow_lines, has_ranks, mirrored_bytes, read_lines

if TYPE_CHECKING:
    from distflow.state.record import TaskRecord, WorkflowRecord

__all__ = [
    "LogLine",
    "LogStream",
    "Tasks",
    "Wait",
    "WorkflowWatch",
    "log_sources",
    "missing_output",
    "rank_of",
    "stream_logs",
]

_RANK_PREFIX = re.compile(r"\[(?:rank ?(\d+)|default(\d+))\]", re.IGNORECASE)
_WAKE_EVERY = 30
"""The number of reads of the record between two checks that a supervisor is running."""
_PATIENCE_S = 10.0
"""Seconds without new output after the workflow's end, after which the rest of the output is considered lost."""

Tasks = Sequence[tuple[str, "TaskRecord"]]
"""Tasks, each with the name of its group."""
Wait = Callable[[float], object]
"""Called with the number of seconds to wait."""


def log_sources(
    client: Client, record: WorkflowRecord, tasks: Iterable[tuple[str, TaskRecord]], attempt: int | None = None
) -> list[LogSource]:
    """Return the logs of these tasks: of attempt number ``attempt`` (from 0), or of all attempts so far."""
    mirror = client.mirror
    return [
        LogSource(task.name, number, mirror.folder(record.uuid, group, task.name, number))
        for group, task in tasks
        for number in (range(task.attempt + 1) if attempt is None else (attempt,))
    ]


class WorkflowWatch:
    """Polls the record of a workflow, and detects the end of its logs."""

    def __init__(self, client: Client, record: WorkflowRecord, *, tasks: Collection[str] | None = None) -> None:
        """Watch a workflow and the logs of the tasks with these names. ``None`` means all tasks."""
        self.record = record
        self._client = client
        self._tasks = tasks
        self._polls = 0
        self._refreshes = 0
        self._still_since = 0
        self._bytes_here = -1

    def refresh(self) -> WorkflowRecord:
        """Read the record again and return it. Every 30th call starts a supervisor if it is needed and none is running."""
        self.record = self._client.store.find(self.record.uuid)
        self._refreshes += 1
        if self._refreshes % _WAKE_EVERY == 0:
            self._client.wake()
        return self.record

    def logs_are_over(self) -> bool:
        """Return whether the workflow has ended and its logs are complete, or have stopped growing.

        Call this method every ``POLL_S`` seconds, because it measures time by the number of calls.
        """
        self.refresh()
        self._polls += 1
        if not self.record.state.is_final:
            return False
        tasks = self._watched()
        if all(task.log_complete for _, task in tasks):
            return True
        here = sum(mirrored_bytes(source) for source in log_sources(self._client, self.record, tasks))
        if here != self._bytes_here:
            self._bytes_here, self._still_since = here, self._polls
        return (self._polls - self._still_since) * POLL_S >= _PATIENCE_S

    def sources(self, attempt: int | None = None) -> list[LogSource]:
        """Return the logs of the watched tasks, of one attempt or of all, including logs that do not exist yet."""
        return log_sources(self._client, self.record, self._watched(), attempt)

    def lines(
        self,
        *,
        attempt: int | None = None,
        last: int | None = None,
        keep: Keep | None = None,
        wait: Wait = pause,
        on_poll: Callable[[WorkflowRecord], None] = lambda _: None,
    ) -> Iterator[LogLine]:
        """Yield lines as they arrive, merged by time, until the workflow has ended and its logs stop growing.

        Args:
            attempt: Yield only lines of this attempt of each task, counted from 0.
            last: The number of existing lines to start with. Default: all.
            keep: A filter that returns whether to yield a line.
            wait: Called with the number of seconds to wait if there are no new lines.
            on_poll: Called with the record each time it is read.

        """

        def is_over() -> bool:
            over = self.logs_are_over()
            on_poll(self.record)
            return over

        return follow_lines(lambda: self.sources(attempt), wait=wait, is_over=is_over, last=last, keep=keep)

    def _watched(self) -> list[tuple[str, TaskRecord]]:
        return [
            (group.name, task)
            for group in self.record.groups
            for task in group.tasks
            if self._tasks is None or task.name in self._tasks
        ]


class LogStream:
    """The output lines of tasks, merged by time. Iterate over it once, then read the remarks."""

    def __init__(self, lines: Iterator[LogLine], remarks: Callable[[], Iterator[str]]) -> None:
        """Store the iterators without reading."""
        self._lines = lines
        self._remarks = remarks

    def __iter__(self) -> Iterator[LogLine]:
        """Return the iterator over the lines."""
        return self._lines

    def remarks(self) -> Iterator[str]:
        """Yield sentences about missing output, ranks whose lines cannot be separated, and tasks that have not started."""
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
    """Return the output lines of tasks, as copied to this machine. This also works after the nodes are gone.

    Args:
        client: The client whose store has the workflow.
        record: The workflow.
        tasks: The tasks to read (see ``choose_tasks``).
        names: Names of tasks for which the lines of all ranks are returned.
        ranks: The global ranks whose lines are returned for all other tasks. Default: all ranks.
        attempt: Return only lines of this attempt, counted from 0. Default: all attempts.
        last: The number of existing lines to start with. Default: all.
        follow: Whether to wait for new lines until the workflow has ended and its logs are complete or stop growing.
        wait: Called with the number of seconds to wait if there are no new lines.

    Returns:
        An iterable of lines, with remarks that explain missing lines.

    Raises:
        StateError: if the logs or the store cannot be read. It can also be raised during the iteration.

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
        yield from _unseparated_ranks(sources, chosen)
        if not any(map(mirrored_bytes, sources)):
            yield from _not_started(watch.record, {one.name for _, one in tasks})

    return LogStream(lines, remarks)


def missing_output(client: Client, record: WorkflowRecord, tasks: Collection[str], attempt: int | None = None) -> Iterator[str]:
    """Yield one or two sentences for each ended attempt of a task whose output is not complete on this machine.

    Args:
        client: The client whose store has the workflow.
        record: The workflow.
        tasks: Names of the tasks to check.
        attempt: The attempt to check, counted from 0. Default: all attempts.

    """
    for group in record.groups:
        for task in group.attempts:
            if task.name not in tasks or task.end is None or attempt not in (None, task.attempt):
                continue
            here = sum(mirrored_bytes(source) for source in log_sources(client, record, [(group.name, task)], task.attempt))
            missing = task.end.output_bytes - here
            size, lost = count_text(missing, "byte"), task.end.lost_output_bytes
            if missing > 0 and task.log_complete:
                yield f"{task.name}: the last {size} of its output {_was(missing)} not received from {task.node}"
            elif missing > 0:
                yield f"{task.name}: {size} of its output {'is' if missing == 1 else 'are'} still on {task.node}"
            if lost:
                where = f"{task.node} had a full or failed disk"
                yield f"{task.name}: {count_text(lost, 'byte')} of its output {_was(lost)} lost: {where}"


def _was(number: int) -> str:
    return "was" if number == 1 else "were"


def rank_of(text: str, held: range) -> int | None:
    """Return the global rank that the prefix of a line names, as torch or torchrun's ``--tee`` writes it, or ``None``.

    Args:
        text: The line.
        held: The ranks of the task that wrote the line. A prefix with any other number gives ``None``.

    >>> rank_of("[rank3]: Traceback (most recent call last):", range(2, 4))
    3
    >>> rank_of("[default1]:loss 0.5", range(2, 4))
    3

    """
    match = _RANK_PREFIX.match(text)
    if match is None:
        return None
    rank = int(match[1]) if match[1] else held.start + int(match[2])
    return rank if rank in held else None


class _RankChoice(Struct, frozen=True):
    """The chosen ranks of a task."""

    held: range
    """All ranks of the task."""
    ranks: frozenset[int]

    @property
    def has_all(self) -> bool:
        """Whether all ranks of the task are chosen."""
        return self.ranks.issuperset(self.held)


def _chosen_ranks(tasks: Tasks, names: Collection[str], ranks: Collection[int]) -> dict[str, _RankChoice]:
    """Return the chosen ranks by task name. Tasks whose ranks are all chosen are left out."""
    choices = {
        one.name: _RankChoice(held=held_ranks(one.ranks), ranks=frozenset(ranks))
        for _, one in tasks
        if ranks and one.name not in names
    }
    return {name: choice for name, choice in choices.items() if not choice.has_all}


def _lines_of_ranks(sources: Collection[LogSource], chosen: Mapping[str, _RankChoice], *, follow: bool) -> Keep:
    """Return a filter for the lines of the chosen ranks.

    A line without a rank is kept if all ranks of its task are chosen. It is also kept if the log does not separate the ranks of
    the task. With ``follow``, the log is still growing, so the filter assumes that it separates them.
    """
    unlabeled: dict[tuple[str, int], bool] = {}

    def is_unlabeled(line: LogLine) -> bool:
        key = line.task, line.attempt
        if key not in unlabeled:
            own = (one for one in sources if (one.task, one.attempt) == key)
            unlabeled[key] = not follow and not any(has_ranks(one) for one in own)
        return unlabeled[key]

    def keep(line: LogLine) -> bool:
        choice = chosen.get(line.task)
        if choice is None or line.dropped or choice.has_all:
            return True
        rank = line.rank if line.rank is not None else rank_of(line.text, choice.held)
        return rank in choice.ranks if rank is not None else is_unlabeled(line)

    return keep


def _not_started(record: WorkflowRecord, tasks: Collection[str]) -> Iterator[str]:
    """Yield a sentence with the status of the workflow, and its reason, if none of these tasks has started."""
    groups = [group for group in record.groups if any(task.name in tasks for task in group.tasks)]
    chosen = [task for group in groups for task in group.tasks if task.name in tasks]
    if any(group.kept for group in groups) or any(task.started_at is not None or task.attempt for task in chosen):
        return
    why = next((f": {group.name}: {plain_lines(group.message)}" for group in groups if group.message), "")
    if len(chosen) == sum(len(group.tasks) for group in record.groups):
        yield f"{record.id} has no output, because nothing has started: {record.status}{why}"
    else:
        names = few([task.name for task in chosen])
        who = "it has" if len(chosen) == 1 else "they have"
        yield f"{record.id} has no output of {names}, because {who} not started: {record.status}{why}"


def _unseparated_ranks(sources: Sequence[LogSource], chosen: Mapping[str, _RankChoice]) -> Iterator[str]:
    """Yield a sentence for each task whose chosen ranks cannot be separated from its other ranks."""
    for name in chosen:
        own = [one for one in sources if one.task == name and mirrored_bytes(one)]
        if own and not any(has_ranks(one) for one in own):
            yield f"{name}: its ranks share one output, so they cannot be separated; `torchrun` and `spawn` separate them"
