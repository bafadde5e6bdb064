"""Use this terminal for a remote command: in raw mode while the command runs, and restored afterwards in any case."""

from __future__ import annotations

import contextlib
import os
import signal
import termios
import tty
from collections.abc import Callable, Iterator
from types import FrameType

__all__ = ["raw_terminal", "read_size"]

_ENDINGS = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


def read_size(fd: int) -> tuple[int, int]:
    """Return the rows and columns of a terminal, or 24 and 80 if they are unknown."""
    with contextlib.suppress(OSError):
        size = os.get_terminal_size(fd)
        if size.lines and size.columns:
            return size.lines, size.columns
    return 24, 80


@contextlib.contextmanager
def raw_terminal(fd: int, on_resize: Callable[[int, int], None]) -> Iterator[None]:
    """Set a terminal to raw mode, and restore it at the end, also before a signal ends the process.

    Args:
        fd: The file descriptor of the terminal.
        on_resize: Called with rows and columns, at the start and when the size of the window changes.

    """
    before = termios.tcgetattr(fd)

    def end(signum: int, _: FrameType | None) -> None:
        raise SystemExit(128 + signum)

    handlers = {number: signal.signal(number, end) for number in _ENDINGS}
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
