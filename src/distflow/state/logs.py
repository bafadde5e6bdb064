"""Reading the mirrored logs as lines: of one or several attempts, merged by time, from the end, or as they come.

A line carries the time of the read on the node that holds its first byte (``output.idx``, see ``state.mirror``). Lines of
one task stay in their order whatever its node's clock does; lines of several are merged by time, so nodes whose clocks
differ interleave as their clocks say. What programs write over itself with carriage returns (progress bars) is given once,
as a terminal would show it in the end. Nothing here holds more than blocks in memory, but for the last ``n`` lines where
those are asked for.
"""

from __future__ import annotations

import heapq
import os
import struct
import sys
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from distflow.state.mirror import INDEX, OUTPUT

__all__ = ["POLL_S", "LogLine", "LogSource", "follow_lines", "mirrored_bytes", "read_lines"]

POLL_S = 0.1
"""Between two looks for new lines."""

_BLOCK = 64 << 10
_LONGEST_LINE = 1 << 20
"""A line without an end is given in pieces of about this size."""
_STAMP = struct.Struct("<dQ")


@dataclass(frozen=True, slots=True)
class LogSource:
    """The mirrored log of one attempt of one task."""

    task: str
    attempt: int
    folder: Path
    """Holds ``output.log`` and ``output.idx``, once there is something; see ``Mirror.folder``."""


@dataclass(frozen=True, slots=True)
class LogLine:
    """One line that a task printed, without its end."""

    task: str
    attempt: int
    time: float | None
    """Seconds since the epoch by the node's clock; ``None`` when the node could not note it."""
    text: str


def mirrored_bytes(source: LogSource) -> int:
    """Return how many bytes of an attempt's output are here."""
    return _size(source.folder / OUTPUT)


def read_lines(sources: Iterable[LogSource], *, last: int | None = None) -> Iterator[LogLine]:
    """Yield the lines that are here now, merged by time; with ``last``, only that many from the end of the merged stream.

    A last line that has not ended is given as it stands. Attempts without output give none.
    """
    readers = [_Reader(source, _tail_start(source.folder / OUTPUT, last)) for source in sources]
    return _merged_tail(readers, last, final=True)


def follow_lines(
    sources: Callable[[], Sequence[LogSource]],
    *,
    wait: Callable[[float], None],
    is_over: Callable[[], bool],
    last: int | None = None,
) -> Iterator[LogLine]:
    """Yield the lines that are here (with ``last``: that many of them), then new ones as they are mirrored, until ``is_over``.

    ``sources`` is asked at every look, so that attempts may come to be later. ``wait`` is called with ``POLL_S`` whenever
    everything that was here has been yielded. What was mirrored before ``is_over`` said so is yielded completely, with lines
    that never ended.
    """
    readers: dict[LogSource, _Reader] = {}
    begun = False
    while True:
        over = is_over()
        for source in sources():
            if source not in readers:
                readers[source] = _Reader(source, _tail_start(source.folder / OUTPUT, None if begun else last))
        yield from _merged_tail(list(readers.values()), None if begun else last, final=over)
        if over:
            return
        begun = True
        wait(POLL_S)


class _Reader:
    """Reads the lines of one attempt, each once, from where it stopped."""

    def __init__(self, source: LogSource, start: int) -> None:
        self._source = source
        self._path = source.folder / OUTPUT
        self._offset = start
        self._times = _Times(source.folder / INDEX)
        self._pending = b""
        self._pending_at = start
        self._held = -1

    def lines(self, *, final: bool) -> Iterator[LogLine]:
        """Yield the lines that have ended; when ``final`` also one that has not. Stops at what is there when it begins."""
        end = _size(self._path)
        self._times.look_again()
        if not final and self._waits_for_times(end):
            return
        while self._offset < end:
            block = _read(self._path, self._offset, min(_BLOCK, end - self._offset))
            if not block:
                break
            at = self._offset
            self._offset += len(block)
            yield from self._feed(block, at)
        if final and self._pending:
            yield self._take_pending()

    def _waits_for_times(self, end: int) -> bool:
        """Let new text wait for one look when its times have not come: the two files are mirrored one after the other."""
        if end > self._offset and not self._times.has_news() and self._held != self._offset:
            self._held = self._offset
            return True
        return False

    def _feed(self, block: bytes, at: int) -> Iterator[LogLine]:
        *ended, rest = block.split(b"\n")
        for number, raw in enumerate(ended):
            if number == 0 and self._pending:
                self._pending += raw
                yield self._take_pending()
            else:
                yield self._line(raw, at)
            at += len(raw) + 1
        if not rest:
            return
        if not self._pending:
            self._pending_at = at
        self._pending += rest
        if len(self._pending) > _LONGEST_LINE:
            # Of a progress bar only its latest states matter; anything else is given as it is.
            before = self._pending.rfind(b"\r", 0, max(0, self._pending.rfind(b"\r")))
            if before >= 0:
                self._pending = self._pending[before + 1 :]
            if len(self._pending) > _LONGEST_LINE:
                yield self._take_pending()

    def _take_pending(self) -> LogLine:
        raw, self._pending = self._pending, b""
        return self._line(raw, self._pending_at)

    def _line(self, raw: bytes, at: int) -> LogLine:
        return LogLine(self._source.task, self._source.attempt, self._times.at(at), _shown(raw))


class _Times:
    """The times of an attempt's output, asked for growing offsets."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._next = -1
        """Number of the first record that was not read; -1: none was looked for."""
        self._times: list[float] = []
        self._starts: list[int] = []
        self._exhausted = False

    def look_again(self) -> None:
        """Let the file be read on, after its end was seen."""
        self._exhausted = False

    def has_news(self) -> bool:
        """Return whether there are records that were not read."""
        return _size(self._path) // _STAMP.size > max(0, self._next)

    def at(self, offset: int) -> float | None:
        """Return the time of the read that holds this byte."""
        if self._next < 0:
            self._next = self._search(offset)
        while not self._exhausted and (not self._starts or self._starts[-1] <= offset):
            self._load()
        position = bisect_right(self._starts, offset) - 1
        return self._times[position] if position >= 0 else None

    def _load(self) -> None:
        """Read the next records; all before the last known one are forgotten."""
        data = _read(self._path, self._next * _STAMP.size, _BLOCK)
        records = list(_STAMP.iter_unpack(data[: len(data) // _STAMP.size * _STAMP.size]))
        self._exhausted = not records
        self._next += len(records)
        self._times = self._times[-1:] + [time for time, _ in records]
        self._starts = self._starts[-1:] + [start for _, start in records]

    def _search(self, offset: int) -> int:
        """Return the number of the last record that starts at or before ``offset``."""
        low, high = 0, _size(self._path) // _STAMP.size
        while high - low > 1:
            middle = (low + high) // 2
            data = _read(self._path, middle * _STAMP.size, _STAMP.size)
            if len(data) == _STAMP.size and _STAMP.unpack(data)[1] <= offset:
                low = middle
            else:
                high = middle
        return low


def _merged_tail(readers: Sequence[_Reader], last: int | None, *, final: bool) -> Iterator[LogLine]:
    merged = heapq.merge(*(_keyed(number, reader, final=final) for number, reader in enumerate(readers)))
    lines: Iterable[tuple[float, int, LogLine]] = merged if last is None else deque(merged, maxlen=min(last, sys.maxsize))
    for _, _, line in lines:
        yield line


def _keyed(number: int, reader: _Reader, *, final: bool) -> Iterator[tuple[float, int, LogLine]]:
    """Yield the lines with keys that never compare lines themselves; one whose clock went back comes at once, in its order."""
    for line in reader.lines(final=final):
        yield line.time or 0.0, number, line


def _tail_start(path: Path, last: int | None) -> int:
    """Return where the last lines of a file begin, reading blocks from its end."""
    if last is None:
        return 0
    end = _size(path)
    if end == 0:
        return 0
    wanted = last + (1 if _read(path, end - 1, 1) == b"\n" else 0)
    if last == 0:
        # A line that has not ended is still to come.
        wanted = 1
    while end > 0:
        start = max(0, end - _BLOCK)
        block = _read(path, start, end - start)
        found = block.count(b"\n")
        if found >= wanted:
            position = len(block)
            for _ in range(wanted):
                position = block.rfind(b"\n", 0, position)
            return start + position + 1
        wanted -= found
        end = start
    return 0


def _shown(raw: bytes) -> str:
    """Return what a terminal shows of a line in the end."""
    text = raw.decode("utf-8", "replace")
    if "\r" not in text:
        return text
    parts = [part for part in text.split("\r") if part]
    if not parts:
        return ""
    if "\x1b" in text:
        # With escape sequences, lengths say nothing: the last state is the whole line.
        return parts[-1].removeprefix("\x1b[K").removeprefix("\x1b[2K")
    line = ""
    for part in parts:
        line = part + line[len(part) :]
    return line.rstrip(" ") if len(parts) > 1 else line


def _size(path: Path) -> int:
    try:
        return os.stat(path).st_size
    except FileNotFoundError:
        return 0


def _read(path: Path, offset: int, count: int) -> bytes:
    """Read a piece; nothing is kept open, because there may be thousands of tasks. Empty when the file is gone."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return b""
    try:
        return os.pread(handle, count, offset)
    finally:
        os.close(handle)
