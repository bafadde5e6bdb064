"""Looking on while a workflow runs: its record as it changes, its logs as they come, a status line below them."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, TextIO

from distflow.cli.bottom import Bottom
from distflow.cli.output import Prefixes, log_sources, what_is_missing
from distflow.cli.reading import pause, wake
from distflow.cli.tables import Paint
from distflow.cli.views import changes, status_line
from distflow.state.logs import POLL_S, LogSource, follow_lines, mirrored_bytes
from distflow.supervisor.clock import SystemClock

if TYPE_CHECKING:
    from distflow.state.directory import StateDirectory
    from distflow.state.record import WorkflowRecord
    from distflow.state.store import Store

__all__ = ["Watch", "follow_workflow", "watch_workflow"]

_WAKE_EVERY = 30
"""Looks at the store between two checks that a supervisor is at work."""
_PATIENCE_S = 10.0
"""How long logs may stand still after the workflow's end before it is taken that the rest will not come."""
_WATCH_S = 1.0

Wait = Callable[[float], object]


class Watch:
    """A workflow's record as it changes, and whether its logs have come to their end."""

    def __init__(
        self, directory: StateDirectory, store: Store, record: WorkflowRecord, *, tasks: Collection[str] | None = None
    ) -> None:
        """Look on at a workflow; ``tasks`` are those whose logs matter, ``None``: all."""
        self.record = record
        self._directory = directory
        self._store = store
        self._tasks = tasks
        self._polls = 0
        self._looks = 0
        self._stands_since = 0
        self._here = -1

    def look(self) -> WorkflowRecord:
        """Return the record as it is now; now and then see to it that somebody works on it."""
        self.record = self._store.find(self.record.uuid)
        self._looks += 1
        if self._looks % _WAKE_EVERY == 0:
            wake(self._directory, self._store)
        return self.record

    def logs_are_over(self) -> bool:
        """Return whether the workflow has ended and its logs are here, or stand still; to be asked every ``POLL_S``."""
        self.look()
        self._polls += 1
        if not self.record.state.is_final:
            return False
        tasks = [(group.name, task) for group in self.record.groups for task in group.tasks if self._wants(task.name)]
        if all(task.log_complete for _, task in tasks):
            return True
        here = sum(mirrored_bytes(source) for source in log_sources(self._directory, self.record, tasks))
        if here != self._here:
            self._here, self._stands_since = here, self._polls
        return (self._polls - self._stands_since) * POLL_S >= _PATIENCE_S

    def sources(self, attempt: int | None = None) -> list[LogSource]:
        """Return the logs that there are, or will be."""
        tasks = [(group.name, task) for group in self.record.groups for task in group.tasks if self._wants(task.name)]
        return log_sources(self._directory, self.record, tasks, attempt)

    def _wants(self, task: str) -> bool:
        return self._tasks is None or task in self._tasks


def follow_workflow(
    directory: StateDirectory, store: Store, record: WorkflowRecord, *, out: TextIO, err: TextIO, wait: Wait = pause
) -> WorkflowRecord:
    """Write the merged logs of a workflow to ``out`` as they come, until it has ended; return its final record.

    On a terminal a line at the bottom says how it stands; elsewhere each change of a status is a line on ``err``.
    ``KeyboardInterrupt`` passes through, the status line cleared away.
    """
    watch = Watch(directory, store, record)
    paint = Paint.of(out)
    prefixes = Prefixes([task for group in record.groups for task in group.tasks], paint)
    bottom = Bottom(out)
    told: WorkflowRecord | None = None

    def is_over() -> bool:
        nonlocal told
        over = watch.logs_are_over()
        if not bottom.is_there:
            for words in changes(told, watch.record):
                out.flush()
                print(words, file=err, flush=True)
            told = watch.record
        return over

    def settle(seconds: float) -> None:
        if bottom.is_there:
            bottom.show(status_line(watch.record, now=SystemClock().now(), paint=paint))
        out.flush()
        wait(seconds)

    try:
        for line in follow_lines(watch.sources, wait=settle, is_over=is_over):
            bottom.clear()
            out.write(f"{prefixes.of(line)}{line.text}\n")
    finally:
        bottom.clear()
        out.flush()
    if bottom.is_there:
        print(status_line(watch.record, now=SystemClock().now(), paint=paint), file=out, flush=True)
    names = {task.name for group in watch.record.groups for task in group.tasks}
    for words in what_is_missing(directory, watch.record, names):
        print(words, file=err)
    return watch.record


def watch_workflow(
    directory: StateDirectory,
    store: Store,
    record: WorkflowRecord,
    render: Callable[[WorkflowRecord], str],
    *,
    out: TextIO | None,
    wait: Wait = pause,
) -> WorkflowRecord:
    """Show a workflow until it has ended, and return its final record.

    On a terminal ``render`` is shown and refreshed in place, and is gone in the end; elsewhere each change of a status is a
    line. Without ``out`` nothing is shown.
    """
    watch = Watch(directory, store, record)
    if out is not None and out.isatty():
        return _watch_live(watch, render, out, wait)
    told: WorkflowRecord | None = None
    while True:
        if out is not None:
            for words in changes(told, watch.record):
                print(words, file=out, flush=True)
        told = watch.record
        if told.state.is_final:
            return told
        wait(_WATCH_S)
        watch.look()


def _watch_live(watch: Watch, render: Callable[[WorkflowRecord], str], out: TextIO, wait: Wait) -> WorkflowRecord:
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    with Live(console=Console(file=out), transient=True, auto_refresh=False) as live:
        while not watch.record.state.is_final:
            live.update(Text.from_ansi(render(watch.record), no_wrap=True, overflow="ellipsis"), refresh=True)
            wait(_WATCH_S)
            watch.look()
    return watch.record
