"""The mirrored logs: a copy of each attempt's output on this machine, by byte offset.

``<logs>/<workflow uuid>/<group>/<task>/<attempt>/`` holds ``output.log`` (raw bytes) and ``output.idx`` (for each
read on the node one little-endian record ``<dQ``: seconds since the epoch, offset of its first byte), as the node
wrote them (``docs/agent-protocol.md``), and ``heartbeat``, empty, whose time is that of the attempt's last one, by our clock.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

__all__ = ["INDEX", "LAST_LINES", "OUTPUT", "Mirror", "attempt_name"]

OUTPUT, INDEX = "output.log", "output.idx"
HEARTBEAT = "heartbeat"

LAST_LINES = 2000
"""How many lines a first cause is looked for in: eight ranks may print tracebacks with C++ frames before torchrun's report."""

_LINE_BYTES = 128
"""Of each line that is asked for, on average; longer lines make fewer."""
_LEAST_TAIL_BYTES = 16384


class Mirror:
    """Reads and writes the mirrored logs below one directory."""

    def __init__(self, root: Path, now: Callable[[], float] | None = None) -> None:
        """Use ``root``, which may not exist yet. What ``write`` wrote gets the time that ``now`` tells, if that is given."""
        self.root = root
        self._now = now

    def folder(self, workflow: str, group: str, task: str, attempt: int) -> Path:
        """Return where the logs of an attempt lie."""
        return self.root / attempt_name(workflow, group, task, attempt)

    def size(self, attempt: str, file: str) -> int:
        """Return how many bytes of a file of an attempt (by its name on the node) are here."""
        try:
            return (self.root / attempt / file).stat().st_size
        except FileNotFoundError:
            return 0

    def write(self, attempt: str, file: str, offset: int, data: bytes) -> None:
        """Put ``data`` where it stood on the node. Raises ``OSError`` when this disk does not take it."""
        path = self.root / attempt / file
        try:
            handle = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
        except FileNotFoundError:
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            handle = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
        try:
            written = 0
            while written < len(data):
                written += os.pwrite(handle, data[written:], offset + written)
            if self._now is not None and file == OUTPUT:
                at = self._now()
                os.utime(handle, (at, at))
        finally:
            os.close(handle)

    def beat(self, attempt: str, at: float) -> None:
        """Take note that an attempt touched its heartbeat at ``at`` (seconds since the epoch); a full disk forgets it."""
        path = self.root / attempt / HEARTBEAT
        with suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            path.touch(mode=0o600)
            os.utime(path, (at, at))

    def alive_at(self, workflow: str, group: str, task: str, attempt: int) -> float | None:
        """Return when output of an attempt came here last, or it touched its heartbeat (seconds since the epoch).

        ``None`` when neither was.
        """
        folder = self.folder(workflow, group, task, attempt)
        times = []
        for name in (OUTPUT, HEARTBEAT):
            with suppress(FileNotFoundError):
                times.append((folder / name).stat().st_mtime)
        return max(times, default=None)

    def last_lines(self, workflow: str, group: str, task: str, attempt: int, count: int) -> tuple[str, ...]:
        """Return the last lines that an attempt printed, as far as they are here; fewer when they are very long."""
        try:
            with (self.folder(workflow, group, task, attempt) / OUTPUT).open("rb") as log:
                end = log.seek(0, os.SEEK_END)
                start = max(0, end - max(_LEAST_TAIL_BYTES, count * _LINE_BYTES))
                log.seek(start)
                data = log.read()
        except FileNotFoundError:
            return ()
        lines = [line for line in data.decode("utf-8", "replace").splitlines() if line.strip()]
        if start > 0 and len(lines) > 1:
            lines = lines[1:]
        return tuple(lines[-count:])


def attempt_name(workflow: str, group: str, task: str, attempt: int) -> str:
    """Return how a node calls an attempt: also the path of its directory below the node's root."""
    return f"{workflow}/{group}/{task}/{attempt}"
