"""``python -m distflow.supervisor STATE_DIRECTORY READY_FD [preload]``: the background process. Users never start it."""

from __future__ import annotations

import gc
import sys


def _main() -> int:
    # Imports create little garbage, and searching for it would delay every start.
    gc.disable()
    from distflow.supervisor.service import main  # noqa: PLC0415  the line above must run first

    return main(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(_main())
