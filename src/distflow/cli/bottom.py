"""One line at the bottom of a terminal, below what scrolls."""

from __future__ import annotations

import threading
from typing import TextIO

from distflow.cli.tables import cut, terminal_width, visible_width

__all__ = ["Bottom"]


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
