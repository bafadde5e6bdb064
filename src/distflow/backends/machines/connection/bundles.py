"""Archives of distflow's own sources for nodes, named by the SHA-256 of their files.

Each is unpacked to its own directory and contains all modules that its services import. ``RUNTIME`` is the node runtime, which
is enough for a gang. ``STORAGE`` also contains the modules for stores, for nodes that upload their outputs themselves.
"""

from __future__ import annotations

import hashlib
import importlib.resources
import io
import zipfile
from dataclasses import dataclass
from functools import cached_property
from typing import Final

__all__ = ["RUNTIME", "STORAGE", "Bundle"]

_STORAGE: Final = (
    "documents/__init__", "documents/text", "documents/urls", "errors", "shell", "storage/__init__",
    "storage/base", "storage/credentials", "storage/datasets", "storage/failures", "storage/files", "storage/node_service",
    "storage/objects", "storage/task_data", "storage/transfers",
)  # fmt: skip
"""The modules that ``storage.node_service`` imports, directly or not. A test runs it with no others."""


@dataclass(frozen=True, kw_only=True)
class Bundle:
    """One archive."""

    package: str
    """Package of its services."""
    modules: tuple[str, ...] = ()
    """Its modules in addition to the node runtime."""

    @cached_property
    def _sources(self) -> dict[str, bytes]:
        """Return the files of the archive by name, sorted."""
        sources = {"distflow/__init__.py": b""}
        top = importlib.resources.files("distflow")
        packages = [("protocol", top.joinpath("protocol")), ("runtime", top.joinpath("runtime"))]
        for name, package in packages:
            for file in package.iterdir():
                if file.name.endswith(".py"):
                    sources[f"distflow/{name}/{file.name}"] = file.read_bytes()
                elif file.is_dir():
                    packages.append((f"{name}/{file.name}", file))
        for name in self.modules:
            sources[f"distflow/{name}.py"] = top.joinpath(f"{name}.py").read_bytes()
        return dict(sorted(sources.items()))

    @cached_property
    def archive(self) -> bytes:
        """Return the zip archive, which has the same bytes for the same sources, wherever it is built."""
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
            for name, data in self._sources.items():
                entry = zipfile.ZipInfo(name, date_time=(1980, 1, 1, 0, 0, 0))
                entry.create_system = 3
                entry.external_attr = 0o600 << 16
                entry.compress_type = zipfile.ZIP_DEFLATED
                archive.writestr(entry, data)
        return buffer.getvalue()

    @cached_property
    def digest(self) -> str:
        """Return the name of its directory on a node: the SHA-256 of all files.

        Each file is hashed as a line with name and size, then its content. The stub computes the same digest from the unpacked
        directory before it imports anything from there.
        """
        digest = hashlib.sha256()
        for name, data in self._sources.items():
            digest.update(b"%s %d\n" % (name.encode(), len(data)) + data)
        return digest.hexdigest()


RUNTIME: Final = Bundle(package="distflow.runtime")
STORAGE: Final = Bundle(package="distflow.storage", modules=_STORAGE)
