"""The mirrored logs: a copy of each attempt's output on this machine, with the same files and the same bytes.

``<logs>/<workflow uuid>/<group>/<task>/<attempt>/`` has the files of ``runtime.files.log_files`` as the node wrote them
(``docs/agent-protocol.md``): ``output.log`` (raw bytes), its later segments, and an index for each. An index has little-endian
records ``<dQ``: a time in seconds since the epoch, and a number. The number's low 48 bits are the offset of the first byte that
was read then, and its other bits are the source (0, or the rank plus 1). ``output.samples`` has the resource samples
(``state.samples``). The modification time of the empty file ``heartbeat`` is that of the attempt's last heartbeat, by the
supervisor's clock.

Output is mirrored only while more than a reserve of the disk is free, so that the store can still be written.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from distflow.protocol.names import attempt_name
from distflow.runtime.files import log_files
from distflow.runtime.files.safe_files import reserve_bytes
from distflow.state.ends import PrintedLine
from distflow.state.logs import LogSource, end_lines

__all__ = ["LAST_LINES", "Mirror"]

HEARTBEAT = "heartbeat"

LAST_LINES = 2000
"""Lines searched for a first cause: eight ranks may print tracebacks with C++ frames before torchrun's report."""

_MOST_SAMPLES = 32 << 20
"""The maximum size of an attempt's resource samples in bytes. A task with 8 GPUs writes about half of it in three weeks."""
_LINE_BYTES = 128
"""The assumed average length of a requested line; if lines are longer, fewer are returned."""
_LEAST_TAIL_BYTES = 16384


class Mirror:
    """Reads and writes the mirrored logs below one directory."""

    def __init__(self, root: Path, now: Callable[[], float] | None = None) -> None:
        """Use ``root``, which may not exist yet. ``now`` gives the modification time of log files that ``write`` changes."""
        self.root = root
        self._now = now

    def folder(self, workflow: str, group: str, task: str, attempt: int) -> Path:
        """Return the directory of an attempt's logs."""
        return self.root / attempt_name(workflow, group, task, attempt)

    def resume_position(self, attempt: str, kind: str) -> tuple[str, int]:
        """Return the position at which mirroring continues: the newest file of a kind, and the number of its mirrored bytes.

        The kinds are ``log``, ``idx`` and ``samples``.
        """
        folder = self.root / attempt
        newest = (log_files.segments(str(folder), kind) or [log_files.LogSegment(0, 0, kind)])[-1].name
        try:
            return newest, (folder / newest).stat().st_size
        except FileNotFoundError:
            return newest, 0

    def has_room(self) -> bool:
        """Return whether output may be written without using the reserve of the disk."""
        return reserve_bytes(str(self.root))[0] <= 0

    def write(self, attempt: str, file: str, offset: int, data: bytes) -> None:
        """Write ``data`` at the offset that it has in the node's file, and remove segments that the node no longer keeps.

        Raises ``OSError`` if this disk cannot store it. Raises ``ValueError`` for a name that is not one of the output's files,
        and for data after a gap, because reading a sparse file could take days. Resource samples above 32 MiB are ignored.
        """
        segment = log_files.parse(file)
        if segment is None:
            raise ValueError(f"{file!r} is not a file of an attempt's output")
        if segment.kind == "samples" and offset + len(data) > _MOST_SAMPLES:
            return
        path = self.root / attempt / file
        if not self.has_room():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        is_new = not path.exists()
        try:
            handle = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
        except FileNotFoundError:
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            handle = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
        try:
            size = os.fstat(handle).st_size
            if offset > size:
                raise ValueError(f"the output {attempt}/{file} has {size} bytes here, but the next data starts at {offset}")
            written = 0
            while written < len(data):
                written += os.pwrite(handle, data[written:], offset + written)
            if self._now is not None and segment.kind == "log":
                at = self._now()
                os.utime(handle, (at, at))
        finally:
            os.close(handle)
        if is_new and segment.start:
            for old in log_files.surplus(log_files.segments(str(path.parent), segment.kind)):
                (path.parent / old.name).unlink(missing_ok=True)

    def record_heartbeat(self, attempt: str, at: float) -> None:
        """Record that an attempt touched its heartbeat at ``at`` (seconds since the epoch). Errors of the disk are ignored."""
        path = self.root / attempt / HEARTBEAT
        with suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            path.touch(mode=0o600)
            os.utime(path, (at, at))

    def alive_at(self, workflow: str, group: str, task: str, attempt: int) -> float | None:
        """Return when an attempt's output last arrived or its heartbeat was last touched (seconds since the epoch).

        Returns ``None`` if neither has happened.
        """
        times = []
        for name in (HEARTBEAT, self.resume_position(attempt_name(workflow, group, task, attempt), "log")[0]):
            with suppress(FileNotFoundError):
                times.append((self.folder(workflow, group, task, attempt) / name).stat().st_mtime)
        return max(times, default=None)

    def last_lines(self, workflow: str, group: str, task: str, attempt: int, count: int) -> tuple[PrintedLine, ...]:
        """Return at most ``count`` last mirrored lines of an attempt's output, without blank lines; fewer if they are long."""
        source = LogSource(task, attempt, self.folder(workflow, group, task, attempt))
        lines = end_lines(source, count, most_bytes=max(_LEAST_TAIL_BYTES, count * _LINE_BYTES))
        printed = [(text, line) for line in lines for text in line.text.splitlines() if text.strip()]
        return tuple(PrintedLine.of(text, line.rank, line.time) for text, line in printed[-count:])
