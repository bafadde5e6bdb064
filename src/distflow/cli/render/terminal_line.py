"""One line at the bottom of a terminal, below what scrolls: a status, or how far a transfer is."""

from __future__ import annotations

import threading
import time
from types import TracebackType
from typing import TextIO

from distflow.cli.render.tables import cut, terminal_width, visible_width
from distflow.documents.quantities import bytes_text

__all__ = [
    "Bottom",
    "ProgressLine",
]


class Bottom:
    """The last line of a terminal, which says how things stand; nothing where ``out`` is no terminal. For any thread."""

    def __init__(self, out: TextIO) -> None:
        """Show nothing yet."""
        self._out = out
        self._shown = ""
        self._lock = threading.Lock()
        self.is_there = out.isatty()

    def show(self, text: str) -> None:
        """Show a line instead of the one before; cut, so that it never wraps."""
        if not self.is_there:
            return
        width = (terminal_width(self._out) or 80) - 1
        if visible_width(text) > width:
            text = cut(text, width)
        with self._lock:
            if text != self._shown:
                self._take_away()
                self._out.write(text)
                self._out.flush()
                self._shown = text

    def clear(self) -> None:
        """Take the line away."""
        with self._lock:
            if self._shown:
                self._take_away()
                self._out.flush()

    def _take_away(self) -> None:
        if self._shown:
            self._out.write("\r\x1b[K")
            self._shown = ""


_EVERY_S = 0.2


class ProgressLine:
    """A context manager; ``told`` may be called from several threads."""

    def __init__(self, out: TextIO, verb: str) -> None:
        """Begin each line with ``verb``, such as ``fetched``."""
        self._bottom = Bottom(out)
        self._verb = verb
        self._begun = self._shown_at = time.monotonic()
        self._lock = threading.Lock()
        self._is_over = False

    def __enter__(self) -> ProgressLine:
        """Show nothing yet."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Take the line away."""
        with self._lock:
            self._is_over = True
            self._bottom.clear()

    @property
    def seconds(self) -> float:
        """Since it began."""
        return time.monotonic() - self._begun

    def told(self, done: int, total: int) -> None:
        """Show how far it is, a few times a second."""
        at = time.monotonic()
        if not self._bottom.is_there or at - self._shown_at < _EVERY_S:
            return
        with self._lock:
            # A thread may be late.
            if not self._is_over:
                self._shown_at = at
                rate = done / max(at - self._begun, 0.001)
                self._bottom.show(f"{self._verb} {bytes_text(done)} of {bytes_text(total)}, {bytes_text(rate)}/s")
