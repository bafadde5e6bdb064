"""A process that knows a secret: no other one may look into it."""

from __future__ import annotations

import subprocess
import sys


def test_its_memory_is_no_longer_for_others() -> None:
    script = (
        "import ctypes; from distflow.runtime.processes import hide_memory\n"
        "asked = lambda: ctypes.CDLL(None).prctl(3, 0, 0, 0, 0)  # PR_GET_DUMPABLE\n"
        "before = asked(); hide_memory(); print(before, asked())"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "1 0\n"
