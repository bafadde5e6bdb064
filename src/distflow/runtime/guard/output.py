"""The output of a command: read from pipes, and written to the log and its index. A full disk does not block the command.

If the launch names the ranks, each rank has its own pipe: a FIFO ``ranks/<rank>`` in the attempt's directory. So the index of
the log shows which rank wrote a line. Ranks of distflow's launcher open their pipes themselves (``distflow.train.launcher``).
Ranks of torchrun, and of launchers that use it, are started through a small shell script that redirects their output:
``PYTHON_EXEC`` makes torchrun start the script instead of Python. Output that is already redirected, such as by torchrun's
``--tee``, is not redirected again. In containers, all ranks share the task's output.
"""

from __future__ import annotations

import os
import struct
import time

from distflow.protocol.light_typing import Dict, List, Optional, Sequence
from distflow.runtime.clock import now
from distflow.runtime.files import log_files
from distflow.runtime.files.log_files import LogSegment
from distflow.runtime.files.masking import Mask, StreamMasker
from distflow.runtime.wire import Json

__all__ = ["RANKS", "RANK_PYTHON", "READ", "OutputPipe", "OutputWriter", "open_rank_pipes", "rank_variables"]


READ = 65536
_STAMP = struct.Struct("<dQ")
_OFFSET_BITS = 48
"""The lower 48 bits of a stamp's integer hold the offset in the log, the upper 16 the source: a rank plus 1, or else 0."""
_MOST_RANK = (1 << (64 - _OFFSET_BITS)) - 2
_DRAIN = 4 * 1024 * 1024
_HELD_S = 0.5
"""How long output is held back if it may be the beginning of a secret."""
_LINE_S = 0.05
"""How long an unfinished line of a rank waits for its end. Without this, other ranks would write into the middle of it."""
_NEVER = float("inf")


class OutputWriter:
    """Moves bytes from non-blocking pipes into the log, and adds a stamp of each written piece to the index.

    ``log`` and ``index`` are descriptors (O_APPEND) of ``output.log`` and ``output.idx`` in the directory ``dir_fd``.
    """

    def __init__(self, dir_fd: int, log: int, index: int, lost: int = 0) -> None:
        self._log = _Log(dir_fd, log, index, lost)
        self._sources: List[OutputPipe] = []
        self._mask: Optional[Mask] = None

    def add(self, pipe: int, rank: Optional[int] = None) -> OutputPipe:
        """Add a pipe to read from. ``rank`` is the rank that writes to it, or None if several may write to it."""
        number = 0 if rank is None or not 0 <= rank <= _MOST_RANK else rank + 1
        source = OutputPipe(pipe, self._log, number)
        source.mask(self._mask)
        self._sources.append(source)
        return source

    def prepare(self, mask: Optional[Mask], launch: Json, directory: str) -> List[OutputPipe]:
        """Apply the launch's settings for output, and create the pipes of its ranks. Returns the pipes."""
        self.mask(mask)
        self.limit(launch.get("max_log"))
        return self.add_ranks(_make_rank_pipes(directory, launch.get("ranks")))

    def add_ranks(self, pipes: Dict[int, int]) -> List[OutputPipe]:
        """Add the pipes of ranks."""
        return [self.add(pipe, rank) for rank, pipe in sorted(pipes.items())]

    @property
    def size(self) -> int:
        """Bytes written into the log, including those that were dropped later."""
        return self._log.size

    @property
    def lost(self) -> int:
        """Bytes that were read but could not be written."""
        return self._log.lost

    @property
    def due_at(self) -> float:
        """When ``flush`` is due, on the monotonic clock."""
        return min((source.due_at for source in self._sources), default=_NEVER)

    def limit(self, max_log: Optional[int]) -> None:
        """Keep about ``max_log`` bytes: the beginning and the end of the log. None keeps the whole log."""
        self._log.max_log = max_log

    def mask(self, mask: Optional[Mask]) -> None:
        """Mask these secrets from now on; None for no secrets."""
        self._mask = mask
        for source in self._sources:
            source.mask(mask)

    def flush(self) -> None:
        """Write held output that is due."""
        for source in self._sources:
            source.flush(time.monotonic())

    def drain(self) -> None:
        """Read the remaining output after the writers have ended.

        It does not wait for the end of file, because another process may still have the pipe open.
        """
        for source in self._sources:
            source.drain()


class OutputPipe:
    """One of the pipes that a command writes to."""

    def __init__(self, pipe: int, log: _Log, number: int) -> None:
        self.pipe = pipe
        self._log = log
        self._number = number
        self._stream: Optional[StreamMasker] = None
        self._line = b""
        self._secret_due_at = _NEVER
        self._line_due_at = _NEVER

    @property
    def due_at(self) -> float:
        """When ``flush`` is due, on the monotonic clock."""
        return min(self._secret_due_at, self._line_due_at)

    def mask(self, mask: Optional[Mask]) -> None:
        """Mask these secrets from now on."""
        self._stream = StreamMasker(mask) if mask is not None else None

    def pump(self) -> int:
        """Read once. Returns the length, 0 at the end of the output, or -1 if nothing is available now."""
        try:
            data = os.read(self.pipe, READ)
        except BlockingIOError:
            return -1
        if data and self._stream is None:
            self._put(data)
        elif data and self._stream is not None:
            self._put(self._stream.feed(data))
            self._secret_due_at = time.monotonic() + _HELD_S if self._stream.holds else _NEVER
        return len(data)

    def flush(self, at: float = _NEVER) -> None:
        """Write held output that is due at ``at`` or earlier (monotonic clock); by default, all held output."""
        if at >= self._secret_due_at:
            self._secret_due_at = _NEVER
            if self._stream is not None:
                self._put(self._stream.flush())
        if at >= self._line_due_at:
            self._line_due_at = _NEVER
            line, self._line = self._line, b""
            self._log.write(line, self._number)

    def drain(self) -> None:
        """Read the available output, about 4 MiB at most, and write everything that was held back."""
        taken = 0
        while taken < _DRAIN:
            got = self.pump()
            if got <= 0:
                break
            taken += got
        self.flush()

    def _put(self, data: bytes) -> None:
        """Write complete lines immediately, and hold back an unfinished line of a rank for a moment."""
        if self._number and data:
            data = self._line + data
            cut = data.rfind(b"\n") + 1 or (len(data) if len(data) >= READ else 0)
            data, self._line = data[:cut], data[cut:]
            if cut:
                self._line_due_at = _NEVER
            if self._line and self._line_due_at == _NEVER:
                self._line_due_at = time.monotonic() + _LINE_S
        self._log.write(data, self._number)


class _Log:
    """The files of the output: the head and, when that is full, the newest segments (``log_files``)."""

    def __init__(self, dir_fd: int, log: int, index: int, lost: int) -> None:
        self._dir_fd = dir_fd
        self._text = log
        self._index = index
        self.lost = lost
        self.max_log: Optional[int] = None
        self._is_disk_full = False
        self._segment = LogSegment(0, 0, "log")
        self._lines: Optional[int] = None
        """Line feeds so far; None if they have not been counted yet."""
        segments = log_files.segments(dir_fd, "log")
        if segments and segments[-1].start:
            self._enter(segments[-1])
        self.size = self._segment.start + os.fstat(self._text).st_size
        if self.size == 0:
            self._lines = 0

    def write(self, data: bytes, number: int) -> None:
        """Append output of a source."""
        while data:
            fitting = self._fitting(data)
            if fitting:
                self._append(data[:fitting], number)
                data = data[fitting:]
            elif not self._begin_next_file():
                self.lost += len(data)
                return

    def _fitting(self, data: bytes) -> int:
        """Return how many bytes fit into this file, whole lines if possible; 0 if the next file must begin."""
        if self.max_log is None:
            return len(data)
        limit, used = log_files.segment_bytes(self._segment, self.max_log), self.size - self._segment.start
        room = limit - used if not used or os.fstat(self._index).st_size < limit else 0
        if len(data) <= room:
            return len(data)
        return (data.rfind(b"\n", 0, max(0, room)) + 1) or (max(0, room) if not used else 0)

    def _append(self, data: bytes, number: int) -> None:
        stamp = _STAMP.pack(now(), number << _OFFSET_BITS | self.size)
        # The stamp is written first, so that a reader of both growing files finds the stamp of each piece of output. After a
        # full disk, the output is written first, because only that shows whether there is space again.
        was_disk_full = self._is_disk_full
        if not was_disk_full:
            self._write(self._index, stamp)
        written = self._write(self._text, data)
        if was_disk_full and written:
            self._write(self._index, stamp)
        self._is_disk_full = written < len(data)
        self.lost += len(data) - written
        self.size += written
        if self._lines is not None:
            self._lines += data.count(b"\n", 0, written)

    def _write(self, fd: int, data: bytes) -> int:
        written = 0
        while written < len(data):
            try:
                written += os.write(fd, data[written:] if written else data)
            except OSError:
                break
        return written

    def _begin_next_file(self) -> bool:
        """Begin the next file, and remove segments that are no longer kept. Returns False if the file cannot be opened."""
        try:
            if self._lines is None:
                fd = os.open(self._segment.name, os.O_RDONLY, dir_fd=self._dir_fd)
                self._lines = self._segment.lines + _count_lines(fd)
            self._enter(LogSegment(self.size, self._lines, "log"))
        except OSError:
            return False
        for kind in ("log", "idx"):
            for old in log_files.surplus(log_files.segments(self._dir_fd, kind)):
                try:
                    os.unlink(old.name, dir_fd=self._dir_fd)
                except OSError:
                    continue
        return True

    def _enter(self, segment: LogSegment) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
        index = os.open(segment._replace(kind="idx").name, flags, 0o600, dir_fd=self._dir_fd)
        try:
            text = os.open(segment.name, flags, 0o600, dir_fd=self._dir_fd)
        except OSError:
            os.close(index)
            raise
        os.close(self._text)
        os.close(self._index)
        self._text, self._index, self._segment = text, index, segment


def _count_lines(fd: int) -> int:
    """Return the number of line feeds in the file, and close ``fd``."""
    count = 0
    try:
        while True:
            data = os.read(fd, 1 << 20)
            if not data:
                return count
            count += data.count(b"\n")
    finally:
        os.close(fd)


RANKS = "ranks"
RANK_PYTHON = "rank-python"
_PIPE_FLAGS = os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW
_SCRIPT = r"""#!/bin/sh
# torchrun starts this script in place of Python. It redirects the rank's output to the rank's pipe, and execs Python.
# The interpreter is that of torchrun (the parent process): the one in its command line, which keeps a virtual environment, or
# else its executable. If neither is a Python, the script uses python3.
python=$(tr '\0' '\n' < "/proc/$PPID/cmdline" | head -n 1)
case ${python##*/} in
    python*|pypy*) ;;
    *) python=$(readlink "/proc/$PPID/exe") ;;
esac
case ${python##*/} in
    python*|pypy*) python=$(command -v "$python") ;;
    *) python= ;;
esac
[ -n "$python" ] || python=$(command -v python3) || python=python3
pipe=$DISTFLOW_ATTEMPT_DIR/ranks/$RANK
if [ -n "$RANK" ] && [ -p "$pipe" ]; then
    out=$(readlink "/proc/$$/fd/1")
    err=$(readlink "/proc/$$/fd/2")
    if [ "$out" = "$DISTFLOW_OUTPUT_PIPE" ]; then exec > "$pipe"; fi
    if [ "$err" = "$DISTFLOW_OUTPUT_PIPE" ]; then exec 2> "$pipe"; fi
fi
unset PYTHON_EXEC
exec "$python" "$@"
"""


def _make_rank_pipes(directory: str, ranks: Optional[Sequence[int]]) -> Dict[int, int]:
    """Create and open the pipes of ranks (``ranks`` is ``[first, count]``), and write the script for torchrun.

    If a file cannot be created, return only the pipes that exist; the other ranks write to the task's output.
    """
    first, count = ranks or (0, 0)
    folder, pipes = os.path.join(directory, RANKS), {}  # type: str, Dict[int, int]
    try:
        if count:
            os.makedirs(folder, mode=0o700, exist_ok=True)
        for rank in range(first, first + count):
            path = os.path.join(folder, str(rank))
            os.mkfifo(path, 0o600)
            # The pipe is also opened for writing, so that it has no end of file before its rank starts or restarts.
            pipes[rank] = os.open(path, os.O_RDWR | _PIPE_FLAGS)
        if count:
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
            fd = os.open(os.path.join(directory, RANK_PYTHON), flags, 0o700)
            with os.fdopen(fd, "w") as file:
                file.write(_SCRIPT)
    except OSError:
        return pipes  # ranks without a pipe write to the task's output
    return pipes


def open_rank_pipes(directory: str) -> Dict[int, int]:
    """Open the existing pipes of ranks, to read output that the keeper did not read."""
    folder, pipes = os.path.join(directory, RANKS), {}  # type: str, Dict[int, int]
    try:
        for name in os.listdir(folder):
            if name.isdigit():
                pipes[int(name)] = os.open(os.path.join(folder, name), os.O_RDONLY | _PIPE_FLAGS)
    except OSError:
        return pipes
    return pipes


def rank_variables(directory: str, output: int, env: Dict[str, str]) -> Dict[str, str]:
    """Return the variables by which ranks find their pipes. ``output`` is the pipe of the command's own output."""
    script = os.path.join(directory, RANK_PYTHON)
    if not os.path.isdir(os.path.join(directory, RANKS)):
        return {}
    variables = {"DISTFLOW_OUTPUT_PIPE": "pipe:[{}]".format(os.fstat(output).st_ino)}
    if "PYTHON_EXEC" not in env and os.access(script, os.X_OK):  # false where the root is mounted `noexec`
        variables["PYTHON_EXEC"] = script
    return variables
