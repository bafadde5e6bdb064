"""A Python with a wrong clock, for nodes that differ from others only in their clock."""

from __future__ import annotations

import sys
from pathlib import Path

__all__ = ["write_skewed_python"]

_WRAPPER = """#!{python} -IS
import os, sys, time
if "-c" not in sys.argv:
    os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
right = time.time
time.time = lambda: right() + {offset_s!r}
at = sys.argv.index("-c")
code = sys.argv[at + 1]
sys.argv[:] = ["-c", *sys.argv[at + 2:]]
exec(compile(code, "<string>", "exec"), {{"__name__": "__main__"}})
"""


def write_skewed_python(path: Path, offset_s: float) -> str:
    """Write a program that is this Python, but for a clock that is ``offset_s`` before the right one; return its path."""
    path.write_text(_WRAPPER.format(python=sys.executable, offset_s=offset_s))
    path.chmod(0o755)
    return str(path)
