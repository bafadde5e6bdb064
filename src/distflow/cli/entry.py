"""The entry point of the command line, with a short start time.

The garbage collector is disabled until the command is imported (``options.LazyGroup``): it runs often during imports but finds
no garbage. This saves a tenth of the time of ``distflow workflow query``. At the end the objects are frozen, because the
interpreter otherwise searches all of them for garbage while it exits. This saves an eighth of the time of ``distflow --help``.

From the import of this module on, Ctrl-C ends the process without a traceback. SIGINT raises ``KeyboardInterrupt`` only while
the command can handle it. Before and after, SIGINT kills the process.
"""

from __future__ import annotations

import gc
import signal

__all__ = ["main"]

_HANDLES_SIGINT = signal.getsignal(signal.SIGINT) is signal.default_int_handler
"""Whether this process may change the handler of SIGINT. A shell starts background processes with SIGINT ignored, which must
stay so."""

if _HANDLES_SIGINT:
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def main() -> None:
    """Run the command line on ``sys.argv`` and exit with its code."""
    gc.disable()
    from distflow.cli.app import main as run  # import it only after gc.disable()

    try:
        run()
    finally:
        if _HANDLES_SIGINT:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
        gc.freeze()
