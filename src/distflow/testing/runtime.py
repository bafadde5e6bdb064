"""Nodes that already have the node runtime, as after their first connection.

The first connection to a node sends the runtime, and its Python compiles some sixty modules: a quarter of a second of processor
time, which is more than most tests of a node need for everything else.
"""

from __future__ import annotations

import importlib.util
import io
import py_compile
import tempfile
import zipfile
from functools import cache
from pathlib import Path

from distflow.backends.machines.connection.bundles import RUNTIME
from distflow.runtime.files.root_directory import PRIVATE, mark

__all__ = ["install_runtime"]


def install_runtime(root: Path) -> None:
    """Put the runtime and its compiled files below ``root``, where the first connection to the node would put it."""
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
    """Every file of the runtime, and next to each what this Python compiles it to."""
    files = {}
    with tempfile.TemporaryDirectory() as folder, zipfile.ZipFile(io.BytesIO(RUNTIME.archive)) as archive:
        archive.extractall(folder)
        for name in archive.namelist():
            source = Path(folder, name)
            compiled = Path(importlib.util.cache_from_source(str(source)))
            mode = py_compile.PycInvalidationMode.UNCHECKED_HASH  # no time of a file has to be kept
            py_compile.compile(str(source), cfile=str(compiled), doraise=True, invalidation_mode=mode)
            files[name] = source.read_bytes()
            files[str(compiled.relative_to(folder))] = compiled.read_bytes()
    return files
