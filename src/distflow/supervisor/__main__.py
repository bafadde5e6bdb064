"""``python -m distflow.supervisor STATE_DIRECTORY READY_FD [BACKENDS]``: the background process. Users never type this."""

from __future__ import annotations

import gc
import sys


def _main() -> int:
    # Modules that are being imported are not garbage, and searching them for it delays every start.
    gc.disable()
    from distflow.supervisor.service import main  # noqa: PLC0415  after the line above, which is the point

    return main(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(_main())
