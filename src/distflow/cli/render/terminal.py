"""Control a terminal: keep a status or progress line at its bottom, and set raw mode for a remote command."""

from __future__ import annotations

import contextlib
import os
import signal
import termios
import threading
import time
import tty
from collections.abc import Callable, Iterator
from types import FrameType, TracebackType
from typing import TextIO

from distflow.cli.render.tables import cut, terminal_width, visible_width
from distflow.documents.quantities import bytes_text, duration_hms

__all__ = ["BottomLine", "ProgressLine", "raw_terminal", "read_size"]


class BottomLine:
    """The last line of a terminal. If ``out`` is not a terminal, nothing is shown. Any thread may use it."""

    def __init__(self, out: TextIO) -> None:
        """Create the line without showing it."""
        self._out = out
        self._shown = ""
        self._lock = threading.Lock()
        self.is_terminal = out.isatty()

    def show(self, text: str) -> None:
        """Replace the line by ``text``, cut to the width of the terminal."""
        if not self.is_terminal:
            return
        width = (terminal_width(self._out) or 80) - 1
        if visible_width(text) > width:
            text = cut(text, width)
        with self._lock:
            if text != self._shown:
                self._erase()
                self._out.write(text)
                self._out.flush()
                self._shown = text

    def clear(self) -> None:
        """Erase the line."""
        with self._lock:
            if self._shown:
                self._erase()
                self._out.flush()

    def _erase(self) -> None:
        if self._shown:
            self._out.write("\r\x1b[K")
            self._shown = ""


_EVERY_S = 0.2
_LINE_EVERY_S = 5.0
"""The interval between lines if the output is not a terminal."""


class ProgressLine:
    """The progress of a transfer, as a context manager. Any thread may call ``update``.

    On a terminal, it is a line at the bottom that disappears at the end. On other outputs, a line is printed every few seconds.
    """

    def __init__(self, out: TextIO, verb: str) -> None:
        """Create the line without showing it. Its text begins with ``verb``, such as ``fetched``."""
        self._out = out
        self._bottom = BottomLine(out)
        self._verb = verb
        self._begun = self._shown_at = time.monotonic()
        self._first: int | None = None
        self._lock = threading.Lock()
        self._is_over = False

    def __enter__(self) -> ProgressLine:
        """Return the line. Calls of ``update`` show it."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Erase the line, and ignore later updates."""
        with self._lock:
            self._is_over = True
            self._bottom.clear()

    @property
    def seconds(self) -> float:
        """Seconds since the line was created."""
        return time.monotonic() - self._begun

    def update(self, done: int, total: int) -> None:
        """Show the progress in bytes, if enough time has passed since the line was created or last changed."""
        at = time.monotonic()
        if self._first is None:
            self._first = done  # more than 0 for a continued transfer
        if at - self._shown_at < (_EVERY_S if self._bottom.is_terminal else _LINE_EVERY_S):
            return
        with self._lock:
            # A thread can call this method after the end of the transfer.
            if self._is_over:
                return
            self._shown_at = at
            text = self._text(done, total, (done - self._first) / max(at - self._begun, 0.001))
            if self._bottom.is_terminal:
                self._bottom.show(text)
            else:
                print(text, file=self._out, flush=True)

    def _text(self, done: int, total: int, rate: float) -> str:
        left = f", {duration_hms((total - done) / rate)} left" if rate > 0 and total > done else ""
        return f"{self._verb} {bytes_text(done)} of {bytes_text(total)}, {bytes_text(rate)}/s{left}"


_FATAL_SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


def read_size(fd: int) -> tuple[int, int]:
    """Return the rows and columns of a terminal, or 24 and 80 if they are unknown."""
    with contextlib.suppress(OSError):
        size = os.get_terminal_size(fd)
        if size.lines and size.columns:
            return size.lines, size.columns
    return 24, 80


@contextlib.contextmanager
def raw_terminal(fd: int, on_resize: Callable[[int, int], None]) -> Iterator[None]:
    """Set a terminal to raw mode, and restore it at the end, also if SIGTERM, SIGHUP or SIGQUIT ends the process.

    Args:
        fd: The file descriptor of the terminal.
        on_resize: Called with rows and columns, at the start and when the size of the window changes.

    """
    before = termios.tcgetattr(fd)

    def end(signum: int, _: FrameType | None) -> None:
        raise SystemExit(128 + signum)

    handlers = {number: signal.signal(number, end) for number in _FATAL_SIGNALS}
    handlers[signal.SIGWINCH] = signal.signal(signal.SIGWINCH, lambda *_: on_resize(*read_size(fd)))
    try:
        # TCSADRAIN keeps the input that the user typed during the connection setup.
        tty.setraw(fd, termios.TCSADRAIN)
        # The size may have changed since the session was opened.
        on_resize(*read_size(fd))
        yield
    finally:
        # Ignore a terminal that no longer exists.
        with contextlib.suppress(termios.error, OSError):
            termios.tcsetattr(fd, termios.TCSADRAIN, before)
        for number, handler in handlers.items():
            signal.signal(number, handler)
