"""The first thing that runs: start the command line with as little ado as possible.

The garbage collector finds nothing to collect among freshly imported modules, but looks for it again and again; it is off until
they are there. That is a tenth of the time that ``distflow workflow query`` takes.

Ctrl-C ends the process without a traceback from the moment that this module is imported: until the command itself can catch
``KeyboardInterrupt``, and after it, the signal has its default effect.
"""

from __future__ import annotations

import gc
import signal

__all__ = ["main"]

_IS_HEEDED = signal.getsignal(signal.SIGINT) is signal.default_int_handler
"""Not in a shell's background, where SIGINT is ignored."""

if _IS_HEEDED:
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def main() -> None:
    """Run the command line on ``sys.argv`` and exit with its code."""
    gc.disable()
    from distflow.cli.app import main as run  # after the line above, which is the point

    gc.freeze()
    gc.enable()
    try:
        run()
    finally:
        if _IS_HEEDED:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
