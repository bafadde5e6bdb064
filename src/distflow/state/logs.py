"""Read the mirrored logs of attempts as lines, merged by time: all lines, the last ones, or new ones while they are written.

The index of a log (``state.mirror``) has the time at which the node read each part of the output, and the rank if the ranks
have separate outputs. A line has the time of its first byte. The lines of a rank stay whole and in order, even if other ranks
write in between.

The lines of one task stay in order even if its node's clock jumps. The lines of several tasks are merged by time, so they
interleave according to their nodes' clocks. Text that a program overwrites with carriage returns (progress bars) is returned
once, in its final state. If output was not kept (``max_log``), a line states how much. The reader keeps only blocks in memory,
and the last ``n`` lines if the caller requests them.
"""

from __future__ import annotations

import heapq
import os
import struct
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from msgspec import Struct

from distflow.runtime.files import log_files
from distflow.runtime.files.log_files import LogSegment
from distflow.structs import replace

__all__ = ["POLL_S", "Keep", "LogLine", "LogSource", "end_lines", "follow_lines", "has_ranks", "mirrored_bytes", "read_lines"]

POLL_S = 0.1
"""Seconds between two polls for new lines."""

_BLOCK = 64 << 10
_LONGEST_LINE = 1 << 20
"""Bytes. A longer line is returned in pieces of about this size."""
_STAMP = struct.Struct("<dQ")
_OFFSET_BITS = 48
_FULL_POLL = 20
"""The directory of a log is read at least once in this number of polls."""
_GROWTH = 8
"""The factor by which more is read if the end of a log has too few lines."""
_MOST_BYTES = 1 << 20
_LONGEST_TEXT = 4096
"""The maximum number of characters of a line that ``end_lines`` returns. The middle of a longer line is left out."""


class LogSource(Struct, frozen=True):
    """The mirrored log of one attempt of one task."""

    task: str
    attempt: int
    folder: Path
    """The directory of ``output.log`` and ``output.idx``, which may not exist yet; see ``Mirror.folder``."""


class LogLine(Struct, frozen=True):
    """One line of a task's output, without its line break."""

    task: str
    attempt: int
    time: float | None
    """Seconds since the epoch by the node's clock; ``None`` if the node could not record it."""
    text: str
    rank: int | None = None
    """The rank that printed it; ``None`` if the task's ranks share one output, or if the process was not a rank."""
    dropped: int = 0
    """For a line that stands for output that was not kept: its number of bytes. The task did not print this line."""


Keep = Callable[[LogLine], bool]
"""Returns whether to yield a line."""


def mirrored_bytes(source: LogSource) -> int:
    """Return the length of an attempt's output as far as it was mirrored, in bytes. Output that was not kept counts, too."""
    return log_files.end_of(str(source.folder))


def has_ranks(source: LogSource) -> bool:
    """Return whether any of the mirrored output comes from a rank with a separate output."""
    for file in log_files.segments(str(source.folder), "idx"):
        at = 0
        while data := _read(source.folder / file.name, at, _BLOCK):
            whole = data[: len(data) // _STAMP.size * _STAMP.size]
            if any(place >> _OFFSET_BITS for _, place in _STAMP.iter_unpack(whole)):
                return True
            at += _BLOCK
    return False


def read_lines(sources: Iterable[LogSource], *, last: int | None = None, keep: Keep | None = None) -> Iterator[LogLine]:
    """Yield the lines that are mirrored now, merged by time. With ``last``, yield only that number of lines from the end.

    A last line without a line break is yielded, too.
    """
    readers = [_Reader(source, _tail_start(source, last, keep), keep) for source in sources]
    return _merged_tail(readers, last, final=True)


def end_lines(source: LogSource, count: int, *, most_bytes: int = _MOST_BYTES) -> list[LogLine]:
    """Return at most ``count`` last lines, from the last ``most_bytes`` of an attempt's output.

    Lines whose beginning was not read are left out if there are others. The middle of very long lines is always left out.
    """
    reader = _Reader(source, _tail_start(source, count, None, most_bytes))
    found = [(line, is_whole) for line, is_whole in reader.marked(final=True) if not line.dropped]
    lines = [line for line, is_whole in found if is_whole] or [line for line, _ in found]
    return [replace(line, text=_cut(line.text)) for line in lines[-count:]]


def follow_lines(
    sources: Callable[[], Sequence[LogSource]],
    *,
    wait: Callable[[float], object],
    is_over: Callable[[], bool],
    last: int | None = None,
    keep: Keep | None = None,
) -> Iterator[LogLine]:
    """Yield the existing lines (with ``last``, only the last ones), then new lines as they are mirrored, until ``is_over``.

    ``sources`` is called at every poll, so that new attempts are included. ``wait`` is called with ``POLL_S`` whenever all
    existing lines have been yielded. All output that was mirrored before ``is_over`` returned True is yielded, including
    lines without a line break.
    """
    readers: dict[LogSource, _Reader] = {}
    begun = False
    while True:
        over = is_over()
        for source in sources():
            if source not in readers:
                readers[source] = _Reader(source, _tail_start(source, None if begun else last, keep), keep)
        yield from _merged_tail(list(readers.values()), None if begun else last, final=over)
        if over:
            return
        begun = True
        wait(POLL_S)


class _Pending(Struct):
    """The beginning of a line whose end has not been read."""

    data: bytes
    time: float | None
    is_whole: bool
    """Whether ``data`` starts at the beginning of the line."""


class _Reader:
    """Reads the lines of one attempt, each once, and continues where it stopped."""

    def __init__(self, source: LogSource, start: int, keep: Keep | None = None) -> None:
        self._source = source
        self._keep = keep
        self._start = self._offset = start
        self._index = _Index(source.folder)
        self._pending: dict[int, _Pending] = {}
        """By source number: 0 for no rank, otherwise the rank plus 1."""
        self._cut = start > 0
        """Whether reading started in the middle or after a gap, so that the first line of each rank may lack its beginning."""
        self._seen: set[int] = set()
        self._newlines = 0
        self._newest: tuple[LogSegment, int, int] | None = None
        """The last file, its end, and the modification time of its directory, at the last full poll."""
        self._polls = 0
        self._end_before = -1
        """The end of the output at the previous poll."""
        self._waited_at = -1
        """The offset at which reading last waited for the index."""

    def lines(self, *, final: bool) -> Iterator[LogLine]:
        """Yield the lines that have ended, and with ``final`` also lines without a line break."""
        for line, _ in self.marked(final=final):
            yield line

    def marked(self, *, final: bool, at_once: bool = False) -> Iterator[tuple[LogLine, bool]]:
        """Yield the lines, each with whether its beginning was read. With ``at_once``, do not wait for the index."""
        for line, is_whole in self._read(final=final, at_once=at_once or final):
            if self._keep is None or self._keep(line):
                yield line, is_whole

    def has_torn_line(self) -> bool:
        """Return whether a line that has not ended lacks its beginning. For a progress bar, the end is enough."""
        return any(not one.is_whole and b"\r" not in one.data for one in self._pending.values())

    def _read(self, *, final: bool, at_once: bool) -> Iterator[tuple[LogLine, bool]]:
        if not final and self._is_unchanged():
            return
        changed_at, files = _changed_at(self._source.folder), log_files.segments(str(self._source.folder), "log")
        ends = [file.start + _size(self._source.folder / file.name) for file in files]
        self._index.refresh()
        end = ends[-1] if ends else 0
        self._newest = (files[-1], end, changed_at) if files else None
        until = end if at_once else self._until(end)
        for file, stop in zip(files, ends, strict=True):
            if file.start > self._offset:
                yield from self._skip_to(file)
            while self._offset < min(stop, until):
                at = self._offset
                block = _read(self._source.folder / file.name, at - file.start, min(_BLOCK, stop - at, until - at))
                if not block:
                    break
                self._offset += len(block)
                self._newlines += block.count(b"\n")
                for first, last, time, number in self._index.runs(at, self._offset):
                    yield from self._feed(block[first - at : last - at], time, number)
        if final:
            yield from self._end_pending()

    def _is_unchanged(self) -> bool:
        """Return whether a cheap check shows that there is no new output: thousands of logs may be followed."""
        self._polls += 1
        if self._newest is None or self._newest[1] != self._offset or self._polls % _FULL_POLL == 0:
            return False
        file, end, changed_at = self._newest
        grown = file.start + _size(self._source.folder / file.name) != end
        return not grown and _changed_at(self._source.folder) == changed_at

    def _until(self, end: int) -> int:
        """Return the offset up to which to read. The text and its index are mirrored one after the other.

        Text waits for one poll if its times have not arrived. Text after the last known record may belong to another rank, so
        it also waits until a poll finds no further text.
        """
        if end <= self._offset:
            return end
        if not self._index.has_news() and self._waited_at != self._offset:
            self._waited_at = self._offset
            return self._offset
        last_start, has_ranks = self._index.newest()
        if not has_ranks:
            return end
        if last_start > self._offset:
            return min(last_start, end)
        is_quiet, self._end_before = self._end_before == end, end
        return end if is_quiet else self._offset

    def _skip_to(self, file: LogSegment) -> Iterator[tuple[LogLine, bool]]:
        """Yield a line about the output that is missing before a file."""
        yield from self._end_pending()
        missing, before = file.start - self._offset, self._lines_before()
        count = file.lines - before if before is not None else 0
        lines = f" in {count:,} line{'s' * (count > 1)}" if count > 0 else ""
        amount = "1 byte" if missing == 1 else f"{missing:,} bytes"
        text = f"[distflow: {amount}{lines} {'was' if missing == 1 else 'were'} not kept here, see `max_log`]"
        self._start = self._offset = file.start
        self._newlines = 0
        self._cut, self._seen = True, set()
        time = next((time for _, _, time, _ in self._index.runs(file.start, file.start + 1)), None)
        yield LogLine(self._source.task, self._source.attempt, time, text, dropped=missing), True

    def _lines_before(self) -> int | None:
        """Return the number of lines before the current offset; ``None`` if it cannot be determined now."""
        files = log_files.segments(str(self._source.folder), "log")
        own = next((file for file in reversed(files) if file.start <= self._start), None)
        if own is None:
            return None
        lines, at = own.lines + self._newlines, own.start
        while at < self._start:
            block = _read(self._source.folder / own.name, at - own.start, min(_BLOCK, self._start - at))
            if not block:
                return None
            lines, at = lines + block.count(b"\n"), at + len(block)
        return lines

    def _feed(self, data: bytes, time: float | None, number: int) -> Iterator[tuple[LogLine, bool]]:
        *ended, rest = data.split(b"\n")
        for raw in ended:
            begun = self._begin(number, time)
            begun.data += raw
            yield self._take(number)
        if not rest:
            return
        begun = self._begin(number, time)
        begun.data += rest
        if len(begun.data) > _LONGEST_LINE:
            # Of a progress bar only the latest states matter; other text is returned unchanged.
            before = begun.data.rfind(b"\r", 0, max(0, begun.data.rfind(b"\r")))
            if before >= 0:
                begun.data = begun.data[before + 1 :]
            if len(begun.data) > _LONGEST_LINE:
                yield self._take(number)

    def _begin(self, number: int, time: float | None) -> _Pending:
        begun = self._pending.get(number)
        if begun is None:
            is_whole = not self._cut or number in self._seen
            self._seen.add(number)
            begun = self._pending[number] = _Pending(b"", time, is_whole)
        return begun

    def _end_pending(self) -> Iterator[tuple[LogLine, bool]]:
        for number in list(self._pending):
            yield self._take(number)

    def _take(self, number: int) -> tuple[LogLine, bool]:
        begun = self._pending.pop(number)
        rank = number - 1 if number else None
        return LogLine(self._source.task, self._source.attempt, begun.time, _shown(begun.data), rank), begun.is_whole


class _Index:
    """Times and sources of an attempt's output. Callers must request increasing offsets."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file: LogSegment | None = None
        self._next = 0
        """The number of the first record of the file that was not read."""
        self._records: deque[tuple[int, float, int]] = deque()
        """Start, time and source; the first is the last record at or before the requested offset."""
        self._exhausted = False
        self._ranks = False

    def refresh(self) -> None:
        """Let ``runs`` read records that were added since it reached the end of the index."""
        self._exhausted = False

    def has_news(self) -> bool:
        """Return whether there are unread records."""
        if self._file is None:
            return any(_size(self._folder / one.name) for one in log_files.segments(str(self._folder), "idx"))
        grown = _size(self._folder / self._file.name) // _STAMP.size > self._next
        return grown or log_files.next_of(str(self._folder), self._file) is not None

    def newest(self) -> tuple[int, bool]:
        """Return the offset of the newest record's text, and whether recent records distinguish ranks."""
        for file in reversed(log_files.segments(str(self._folder), "idx")):
            end = _size(self._folder / file.name) // _STAMP.size * _STAMP.size
            begin = max(0, end - _BLOCK // _STAMP.size * _STAMP.size)
            places = [place for _, place in _STAMP.iter_unpack(_read(self._folder / file.name, begin, end - begin))]
            if places:
                self._ranks = self._ranks or any(place >> _OFFSET_BITS for place in places)
                return places[-1] & ((1 << _OFFSET_BITS) - 1), self._ranks
        return 0, self._ranks

    def runs(self, begin: int, end: int) -> Iterator[tuple[int, int, float | None, int]]:
        """Yield the parts of the output from ``begin`` to ``end``, each with its time and source."""
        while not self._exhausted and (not self._records or self._records[-1][0] < end):
            self._load(begin)
        while begin < end:
            while len(self._records) > 1 and self._records[1][0] <= begin:
                self._records.popleft()
            first = self._records[0] if self._records else None
            if first is None:
                yield begin, end, None, 0
                return
            if first[0] > begin:
                stop, time, number = min(end, first[0]), None, 0
            else:
                stop = min(end, self._records[1][0]) if len(self._records) > 1 else end
                _, time, number = first
            yield begin, stop, time, number
            begin = stop

    def _load(self, begin: int) -> None:
        """Read the next records."""
        if self._file is None:
            files = log_files.segments(str(self._folder), "idx")
            self._file = next((one for one in reversed(files) if one.start <= begin), files[0] if files else None)
            if self._file is None:
                self._exhausted = True
                return
            self._next = self._search(self._file, begin)
        data = _read(self._folder / self._file.name, self._next * _STAMP.size, _BLOCK)
        records = [
            (place & ((1 << _OFFSET_BITS) - 1), time, place >> _OFFSET_BITS)
            for time, place in _STAMP.iter_unpack(data[: len(data) // _STAMP.size * _STAMP.size])
        ]
        self._next += len(records)
        self._records.extend(records)
        if not records:
            following = log_files.next_of(str(self._folder), self._file)
            if following is None:
                self._exhausted = True
            else:
                self._file, self._next = following, 0

    def _search(self, file: LogSegment, offset: int) -> int:
        """Return the number of the last record that starts at or before ``offset``."""
        low, high = 0, _size(self._folder / file.name) // _STAMP.size
        while high - low > 1:
            middle = (low + high) // 2
            data = _read(self._folder / file.name, middle * _STAMP.size, _STAMP.size)
            if len(data) == _STAMP.size and _STAMP.unpack(data)[1] & ((1 << _OFFSET_BITS) - 1) <= offset:
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
    """Yield the lines with keys for ``heapq.merge``, which then never compares lines."""
    for line in reader.lines(final=final):
        yield line.time or 0.0, number, line


def _tail_start(source: LogSource, last: int | None, keep: Keep | None, most_bytes: int = sys.maxsize) -> int:
    """Return an offset from which a reader gets the ``last`` lines complete, if they fit into ``most_bytes``.

    To find it, larger and larger parts of the end are read.
    """
    if last is None:
        return 0
    end, window = mirrored_bytes(source), _BLOCK
    while window < min(end, most_bytes):
        start = end - window
        reader, count = _Reader(source, start, keep), 0
        for _, is_whole in reader.marked(final=False, at_once=True):
            count = count + 1 if is_whole else 0
        # A line that has not ended will be yielded later, so its beginning is needed even if no existing line is requested.
        if count >= max(last, 1) and not reader.has_torn_line():
            return start
        window *= _GROWTH
    return max(0, end - most_bytes)


def _cut(text: str) -> str:
    if len(text) <= _LONGEST_TEXT:
        return text
    half = _LONGEST_TEXT // 2
    return f"{text[:half]} … {text[-half:]}"


def _shown(raw: bytes) -> str:
    """Return the line as a terminal would finally show it."""
    text = raw.decode("utf-8", "replace")
    if "\r" not in text:
        return text
    parts = [part for part in text.split("\r") if part]
    if not parts:
        return ""
    if "\x1b" in text:
        # With escape sequences, lengths are meaningless: take the last state as the whole line.
        return parts[-1].removeprefix("\x1b[K").removeprefix("\x1b[2K")
    line = ""
    for part in parts:
        line = part + line[len(part) :]
    return line.rstrip(" ") if len(parts) > 1 else line


def _changed_at(folder: Path) -> int:
    """Return when a file was last added to a directory or removed from it, in nanoseconds."""
    try:
        return os.stat(folder).st_mtime_ns
    except FileNotFoundError:
        return 0


def _size(path: Path) -> int:
    try:
        return os.stat(path).st_size
    except FileNotFoundError:
        return 0


def _read(path: Path, offset: int, count: int) -> bytes:
    """Read a piece of a file; empty if it is gone. No file is kept open, because there may be thousands of tasks."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return b""
    try:
        return os.pread(handle, count, offset)
    finally:
        os.close(handle)
