"""The first thing that runs: start the command line with as little ado as possible.

The garbage collector finds nothing to collect among freshly imported modules, but looks for it again and again; it is off until
they are there. That is a tenth of the time that ``distflow workflow query`` takes.
"""

from __future__ import annotations

import gc

__all__ = ["main"]


def main() -> None:
    """Run the command line on ``sys.argv`` and exit with its code."""
    gc.disable()
    from distflow.cli.app import main as run  # after the line above, which is the point

    gc.freeze()
    gc.enable()
    run()
