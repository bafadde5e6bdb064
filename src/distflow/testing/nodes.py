"""Prepare nodes for tests: install the runtime, set a wrong clock, or simulate another version of Python.

Without ``install_runtime``, a node receives the runtime on the first connection and compiles all of its modules. This takes a
quarter of a second of CPU time, which is more than most tests of a node need for everything else.
"""

from __future__ import annotations

import importlib.util
import io
import py_compile
import sys
import tempfile
import zipfile
from functools import cache
from pathlib import Path

from distflow.backends.machines.connection.bootstrap import RUNTIME
from distflow.runtime.files.root_directory import PRIVATE, mark

__all__ = ["install_runtime", "write_other_python", "write_skewed_python"]


def install_runtime(root: Path) -> None:
    """Install the runtime and its compiled files below ``root``, as the first connection to the node would."""
    private = root / PRIVATE
    home = private / "runtime" / RUNTIME.digest
    if home.exists():
        return
    for name, content in _files().items():
        path = home / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    for directory in (private, home.parent, home):
        directory.chmod(0o700)
    mark(str(private))


@cache
def _files() -> dict[str, bytes]:
    """Return every file of the runtime, each with its compiled file."""
    files = {}
    with tempfile.TemporaryDirectory() as folder, zipfile.ZipFile(io.BytesIO(RUNTIME.archive)) as archive:
        archive.extractall(folder)
        for name in archive.namelist():
            source = Path(folder, name)
            compiled = Path(importlib.util.cache_from_source(str(source)))
            mode = py_compile.PycInvalidationMode.UNCHECKED_HASH  # independent of file times
            py_compile.compile(str(source), cfile=str(compiled), doraise=True, invalidation_mode=mode)
            files[name] = source.read_bytes()
            files[str(compiled.relative_to(folder))] = compiled.read_bytes()
    return files


_WRAPPER = """#!{python} -IS
import os, sys, time
if "-c" not in sys.argv:
    os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
{change}
at = sys.argv.index("-c")
code = sys.argv[at + 1]
sys.argv[:] = ["-c", *sys.argv[at + 2:]]
exec(compile(code, "<string>", "exec"), {{"__name__": "__main__"}})
"""


def write_skewed_python(path: Path, offset_s: float) -> str:
    """Write a wrapper of this Python and return its path. In ``-c`` programs, ``time.time`` is ``offset_s`` seconds ahead."""
    return _write_wrapper(path, f"right = time.time\ntime.time = lambda: right() + {offset_s!r}")


def write_other_python(path: Path, version: tuple[int, int, int]) -> str:
    """Write a wrapper of this Python and return its path. In ``-c`` programs, ``sys.version_info`` is ``version``."""
    return _write_wrapper(path, f"sys.version_info = {(*version, 'final', 0)!r}")


def _write_wrapper(path: Path, change: str) -> str:
    path.write_text(_WRAPPER.format(python=sys.executable, change=change))
    path.chmod(0o755)
    return str(path)
