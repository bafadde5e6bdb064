"""The output of a workflow as pages of lines, and its metrics as series.

The browser shows a few lines of a log, which may have millions. The lines are in a temporary file. Their positions, tasks and
times are in memory, in 20 bytes for each line.
"""

from __future__ import annotations

import re
import tempfile
import threading
import time
from array import array
from bisect import bisect_right
from collections.abc import Iterator
from itertools import islice

from distflow.cli.workflow.records import log_line_json
from distflow.client.client import Client
from distflow.client.logs import LogLine, Tasks, rank_of, stream_logs
from distflow.client.measurements.metrics import number
from distflow.client.workflows import choose_tasks, find_workflow, held_ranks
from distflow.documents.json_keys import name_keys
from distflow.errors import DistflowError
from distflow.state.metrics import read_metrics
from distflow.structs import replace

__all__ = ["Followers", "LogPages"]

_MOST_LINES = 1_000_000
"""If there are more lines, the first half is removed."""
_LONGEST_LINE = 16 << 10
_MOST_ON_A_PAGE = 1000
_MOST_HITS = 10_000
_MOST_SERIES = 2000
_MOST_POINTS = 2000
_BLOCK = 4 << 20
_ESCAPE = re.compile(rb"\x1b(?:\[[\d;]*[a-z]|\][^\x07\x1b]*(?:\x07|\x1b\\)|.)")
"""An escape sequence of a terminal, in lower-case text. The web page shows such sequences as colors, or removes them."""

_Source = tuple[str, int, int | None]
"""Task, attempt and rank of a line."""


class LogPages:
    """The lines of a workflow in the order in which they arrived. One thread may add lines while others read."""

    def __init__(self) -> None:
        """Create an empty log."""
        self._ranks_of_tasks: dict[str, range] = {}
        self._lock = threading.Lock()
        self._file = tempfile.TemporaryFile()
        self._starts, self._origins, self._times = array("Q", [0]), array("I"), array("d")
        self._sources: dict[_Source, int] = {}
        self._names: list[_Source] = []
        self._views: dict[tuple[str | None, int | None], tuple[array[int], int]] = {}
        self._series: dict[tuple[str, int | None, str], dict[int, tuple[float, float | None]]] = {}
        self.removed = 0
        """The number of lines that were removed from the beginning."""

    def __len__(self) -> int:
        """Return the number of lines, without those that were removed."""
        return len(self._times)

    def close(self) -> None:
        """Remove the lines. The metrics remain."""
        self._file.close()

    def use_ranks_of(self, tasks: Tasks) -> None:
        """Store the ranks of the tasks.

        A later line without a rank then gets its rank from a prefix such as ``[rank3]:``, if its task has this rank.
        """
        self._ranks_of_tasks = {task.name: held_ranks(task.ranks) for _, task in tasks}

    def add(self, line: LogLine) -> None:
        """Add a line at the end, and its metrics."""
        if line.rank is None and line.text.startswith("["):
            line = replace(line, rank=rank_of(line.text, self._ranks_of_tasks.get(line.task, range(0))))
        data = line.text.encode("utf-8", "replace").replace(b"\n", b" ")
        if len(data) > _LONGEST_LINE:
            data = data[:_LONGEST_LINE] + b" \xe2\x80\xa6"
        with self._lock:
            source = line.task, line.attempt, line.rank
            if source not in self._sources:
                self._sources[source] = len(self._names)
                self._names.append(source)
            self._file.seek(self._starts[-1])
            self._file.write(data + b"\n")
            self._starts.append(self._starts[-1] + len(data) + 1)
            self._origins.append(self._sources[source])
            self._times.append(float("nan") if line.time is None else line.time)
            for metric in read_metrics([line]):
                for name, value in metric.values.items():
                    if (finite := number(value)) is not None:
                        self._add_point((metric.task, metric.rank, name), metric.step, finite, metric.time)
            if len(self._times) > _MOST_LINES:
                self._remove_half()

    def _add_point(self, key: tuple[str, int | None, str], step: int, value: float, at: float | None) -> None:
        if key not in self._series and len(self._series) >= _MOST_SERIES:
            return
        points = self._series.setdefault(key, {})
        points.pop(step, None)  # a later attempt may reach the same step again
        points[step] = value, at
        if len(points) >= 2 * _MOST_POINTS:
            self._series[key] = dict(islice(points.items(), 0, None, 2))

    def _remove_half(self) -> None:
        half = len(self._times) // 2
        kept, begin = tempfile.TemporaryFile(), self._starts[half]
        self._file.seek(begin)
        while block := self._file.read(_BLOCK):
            kept.write(block)
        self._file.close()
        self._file = kept
        self._starts = array("Q", (start - begin for start in self._starts[half:]))
        self._origins, self._times = self._origins[half:], self._times[half:]
        self._views.clear()
        self.removed += half

    def page(self, first: int, count: int, task: str | None = None, rank: int | None = None) -> dict[str, object]:
        """Return some lines of the log, or of one task or rank.

        Args:
            first: The position of the first line, counted from 0. A negative position is counted from the end.
            count: The number of lines, at most 1000.
            task: Return only lines of this task. Default: all.
            rank: Return only lines of this rank. Default: all.

        Returns:
            The total number of lines of the log, task or rank, the position of the first returned line, the number of lines
            that were removed, all tasks and ranks, and the lines in the format of ``logs``.

        """
        with self._lock:
            view = self._view(task, rank)
            total = len(self._times) if view is None else len(view)
            first = max(0, first + total if first < 0 else first)
            chosen = range(first, min(first + min(count, _MOST_ON_A_PAGE), total))
            lines = [log_line_json(self._line(position if view is None else view[position])) for position in chosen]
        ranks = dict.fromkeys((name, one) for name, _, one in self._sources)
        sources = [{**name_keys(task=name), "rank": one} for name, one in ranks]
        return {"total": total, "first": first, "removed": self.removed, "sources": sources, "lines": lines}

    def lines(self, first: int, count: int) -> list[LogLine]:
        """Return at most ``count`` lines, from the position ``first`` on."""
        with self._lock:
            return [self._line(position) for position in range(first, min(first + count, len(self._times)))]

    def _line(self, position: int) -> LogLine:
        start, end = self._starts[position], self._starts[position + 1]
        self._file.seek(start)
        task, attempt, rank = self._names[self._origins[position]]
        at = self._times[position]
        text = self._file.read(end - start - 1).decode("utf-8", "replace")
        return LogLine(task, attempt, None if at != at else at, text, rank)  # noqa: PLR0124  NaN

    def _view(self, task: str | None, rank: int | None) -> array[int] | None:
        """Return the positions of the lines of a task or rank, or ``None`` for all lines. A cached result is extended."""
        if task is None and rank is None:
            return None
        if len(self._views) >= 64:
            self._views.clear()
        view, done = self._views.get((task, rank), (array("I"), 0))
        wanted = {
            origin
            for (name, _, one), origin in self._sources.items()
            if task in (None, name) and rank in (None, one)
        }  # fmt: skip
        view.extend(at for at in range(done, len(self._origins)) if self._origins[at] in wanted)
        self._views[task, rank] = view, len(self._origins)
        return view

    def search(self, text: str, task: str | None = None, rank: int | None = None) -> dict[str, object]:
        """Return the positions of the lines that contain a text, regardless of the case of ASCII letters.

        The positions are those of ``page`` for the same task and rank. There are at most 10 000.
        If ``is_complete`` is false, there may be more.
        """
        needle = text.encode().lower()
        with self._lock:
            view = self._view(task, rank)
            hits = self._hits(needle) if needle.strip() else iter(())
            if view is not None:
                in_view = {line: position for position, line in enumerate(view)}
                hits = (in_view[line] for line in hits if line in in_view)
            found = list(islice(hits, _MOST_HITS))
        return {"text": text, "positions": found, "is_complete": len(found) < _MOST_HITS}

    def _hits(self, needle: bytes) -> Iterator[int]:
        position = 0
        while position < len(self._times):
            begin = self._starts[position]
            until = max(position + 1, bisect_right(self._starts, begin + _BLOCK) - 1)
            self._file.seek(begin)
            block, at = self._file.read(self._starts[until] - begin).lower(), 0
            if b"\x1b" in block:  # escape sequences may split the text
                lines = enumerate(block.split(b"\n")[:-1], position)
                yield from (number for number, line in lines if needle in _ESCAPE.sub(b"", line))
                position = until
                continue
            while (at := block.find(needle, at)) >= 0:
                line = bisect_right(self._starts, begin + at) - 1
                yield line
                at = self._starts[line + 1] - begin
            position = until

    def series(self) -> dict[str, object]:
        """Return the metrics as series of (step, value, time), one for each task, rank and name."""
        with self._lock:
            found = [
                {
                    **name_keys(task=task),
                    "rank": rank,
                    "key": key,
                    "points": [(step, value, at) for step, (value, at) in points.items()],
                }
                for (task, rank, key), points in self._series.items()
            ]
        return {"series": found}


class _Follower:
    """Reads the output of one workflow in a thread, until the workflow ends or no web page has requested it for a minute."""

    _IDLE_S = 60.0

    def __init__(self, key: str) -> None:
        self.pages = LogPages()
        self.requested_at = time.monotonic()
        self.has_ended = False
        """Whether the workflow has ended and all of its output has been read."""
        self.has_stopped = False
        """Whether the thread stopped before the workflow had ended: no web page requested the output, or there was an error."""
        self.remarks: list[str] = []
        self.error: DistflowError | None = None
        self._key = key
        self._stop = threading.Event()
        self._caught_up = threading.Event()
        self._thread = threading.Thread(target=self._run, name="logs", daemon=True)
        self._thread.start()

    def await_lines(self, seconds: float) -> None:
        """Wait until all existing lines have been read, but at most ``seconds``. Raise the error of the thread."""
        self.requested_at = time.monotonic()
        self._caught_up.wait(seconds)
        if self.error is not None:
            raise self.error

    def close(self) -> None:
        """End the thread."""
        self._stop.set()

    def _run(self) -> None:
        try:
            with Client() as client:
                record = find_workflow(client, self._key, report_age=False)
                tasks = choose_tasks(record, ())
                self.pages.use_ranks_of(tasks)
                stream = stream_logs(client, record, tasks, follow=True, wait=self._wait)
                for line in stream:
                    if self._stop.is_set():
                        return
                    self.pages.add(line)
                self.remarks = list(stream.remarks())
                self.has_ended = True
        except _Stopped:
            self.has_stopped = True
        except DistflowError as error:
            self.error, self.has_stopped = error, True
        finally:
            self._caught_up.set()

    def _wait(self, seconds: float) -> None:
        self._caught_up.set()
        if self._stop.wait(3 * seconds) or time.monotonic() - self.requested_at > self._IDLE_S:
            raise _Stopped


class _Stopped(Exception):
    """Raised in the thread of a follower to end it."""


class Followers:
    """The followers of the workflows that browsers show. Only the most recently requested ones are kept."""

    _MOST = 6

    def __init__(self) -> None:
        """Start without followers."""
        self._lock = threading.Lock()
        self._followers: dict[str, _Follower] = {}

    def follow(self, uuid: str, *, wait_s: float = 0.5) -> _Follower:
        """Return the follower of a workflow, which adds new lines while web pages request them.

        Wait until all existing lines have been read, but at most ``wait_s``. Raise the error of the follower, if any.
        """
        with self._lock:
            found = self._followers.get(uuid)
            if found is None or found.has_stopped:
                found = self._followers[uuid] = _Follower(uuid)
                if len(self._followers) > self._MOST:
                    self._close(min(self._followers, key=lambda one: self._followers[one].requested_at))
        found.await_lines(wait_s)
        return found

    def close(self) -> None:
        """End all threads."""
        with self._lock:
            for uuid in list(self._followers):
                self._close(uuid)

    def _close(self, uuid: str) -> None:
        self._followers.pop(uuid).close()
