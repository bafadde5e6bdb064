"""What is shipped to nodes: archives of distflow's own sources, named by the SHA-256 of their files.

Each is unpacked to a directory of its own and holds all that its services import: ``RUNTIME`` the node runtime, which is enough
for a gang; ``STORAGE`` also what reaches stores, for nodes that write their outputs themselves.
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
"""The modules that ``storage.node_service`` imports, directly or not; a test runs it with nothing else."""


@dataclass(frozen=True, kw_only=True)
class Bundle:
    """One archive."""

    package: str
    """Where its services are."""
    modules: tuple[str, ...] = ()
    """What it has beside the node runtime."""

    @cached_property
    def _sources(self) -> dict[str, bytes]:
        """The files of the archive, by their names and in the order of these."""
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
        """A zip archive: the same bytes for the same sources, wherever and whenever it is made."""
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
        """The name of its directory on a node: SHA-256 of all files, each as a line with its name and size, then its content.

        The stub computes the same from the unpacked directory before it imports anything from there.
        """
        digest = hashlib.sha256()
        for name, data in self._sources.items():
            digest.update(b"%s %d\n" % (name.encode(), len(data)) + data)
        return digest.hexdigest()


RUNTIME: Final = Bundle(package="distflow.runtime")
STORAGE: Final = Bundle(package="distflow.storage", modules=_STORAGE)
