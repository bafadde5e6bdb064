"""``distflow.train`` on its way to nodes that have no distflow: one archive of its sources, sent like any file of a spec.

It has a ``distflow/__init__.py`` of its own, which also finds what of distflow is installed on the node; ``distflow.train``
itself is always the one of the machine where the workflow was submitted.
"""

from __future__ import annotations

import gzip
import io
import tarfile
from pathlib import Path

import distflow
from distflow.spec.model import GroupSpec, TaskSpec, WorkflowSpec

__all__ = ["LIBRARY", "library_archive", "needs_library", "sends_library"]

LIBRARY = "distflow.train"
"""Name of the archive among those of a spec, which are named by their paths."""

_PACKAGE = """\
\"\"\"distflow.train, as distflow brings it; beside it, what of distflow is installed here.\"\"\"

from pkgutil import extend_path

__path__ = extend_path(__path__, __name__)
__version__ = {version!r}
"""


def sends_library(spec: WorkflowSpec) -> bool:
    """Return whether any task of the spec needs the archive."""
    return any(needs_library(group, task) for group in spec.groups for task in group.tasks)


def needs_library(group: GroupSpec, task: TaskSpec) -> bool:
    """Return whether a task is given ``distflow.train``: its launcher is part of it, or its group says how it trains."""
    return task.launcher.kind == "spawn" or group.framework is not None or group.strategy is not None


def library_archive() -> bytes:
    """Return a gzipped tar: the same bytes for the same sources, wherever and whenever it is made."""
    top = Path(distflow.__file__).parent
    modules = [top / "distributed.py", *(top / "protocol").rglob("*.py"), *(top / "train").rglob("*.py")]
    sources = {f"distflow/{path.relative_to(top).as_posix()}": path.read_bytes() for path in modules}
    sources["distflow/__init__.py"] = _PACKAGE.format(version=distflow.__version__).encode()
    buffer = io.BytesIO()
    with (
        gzip.GzipFile(filename="", mode="wb", fileobj=buffer, mtime=0) as packed,
        tarfile.open(fileobj=packed, mode="w|", format=tarfile.PAX_FORMAT) as archive,
    ):
        for name in sorted(sources):
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(sources[name]), 0o600
            archive.addfile(entry, io.BytesIO(sources[name]))
    return buffer.getvalue()
