"""Our terminal as the terminal of a command elsewhere: raw while that runs, and as it was afterwards, whatever happens."""

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
    """Return rows and columns of a terminal."""
    with contextlib.suppress(OSError):
        size = os.get_terminal_size(fd)
        if size.lines and size.columns:
            return size.lines, size.columns
    return 24, 80


@contextlib.contextmanager
def raw_terminal(fd: int, on_resize: Callable[[int, int], None]) -> Iterator[None]:
    """Let every key through, and tell when the window changes; signals that would end us restore the terminal first."""
    before = termios.tcgetattr(fd)

    def end(signum: int, _: FrameType | None) -> None:
        raise SystemExit(128 + signum)

    handlers = {number: signal.signal(number, end) for number in _ENDINGS}
    handlers[signal.SIGWINCH] = signal.signal(signal.SIGWINCH, lambda *_: on_resize(*read_size(fd)))
    try:
        # What was typed while the node was reached is kept.
        tty.setraw(fd, termios.TCSADRAIN)
        # It may have changed since it was told.
        on_resize(*read_size(fd))
        yield
    finally:
        # A terminal that is gone needs nothing.
        with contextlib.suppress(termios.error, OSError):
            termios.tcsetattr(fd, termios.TCSADRAIN, before)
        for number, handler in handlers.items():
            signal.signal(number, handler)
