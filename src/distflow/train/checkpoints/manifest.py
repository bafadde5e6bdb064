"""Directories of checkpoints: their names, manifests and completeness. This module does not import torch.

``step-12`` is a checkpoint. ``step-12.tmp`` is being written or removed, or is unfinished. ``step-12.old`` is being replaced.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

__all__ = [
    "MANIFEST",
    "FileEntry",
    "Manifest",
    "clear_unfinished",
    "describe",
    "find_problems",
    "found_steps",
    "prune",
    "publish",
    "read_manifest",
    "recover",
    "sync_file",
    "unfinished",
]

MANIFEST = "manifest.json"
_NAME = re.compile(r"step-(\d+)")
_UNFINISHED = re.compile(r"step-\d+\.(?:tmp|old)")
_CHUNK = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class FileEntry:
    """The expected size and checksum of a file."""

    size: int
    """In bytes."""
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The content of a complete checkpoint."""

    step: int
    world_size: int
    """Number of ranks that wrote it."""
    files: Mapping[str, FileEntry]


def unfinished(directory: Path, step: int) -> Path:
    """Return the directory of a checkpoint that is being written or removed."""
    return directory / f"step-{step}.tmp"


def found_steps(directory: Path) -> list[int]:
    """Return the steps of the checkpoints in a directory, newest first, complete or broken."""
    try:
        names = [path.name for path in directory.iterdir()]
    except FileNotFoundError:
        return []
    return sorted((int(match[1]) for match in map(_NAME.fullmatch, names) if match), reverse=True)


def recover(directory: Path) -> None:
    """Restore the names of checkpoints whose writer was killed while it replaced them."""
    for path in directory.glob("step-*.old"):
        place = path.with_suffix("")
        if _NAME.fullmatch(place.name) and not place.exists():
            path.rename(place)


def clear_unfinished(directory: Path) -> None:
    """Call ``recover``, then remove the unfinished checkpoints of earlier writers."""
    recover(directory)
    for path in directory.iterdir():
        if _UNFINISHED.fullmatch(path.name):
            _remove(path)


def describe(folder: Path, names: Iterable[str]) -> dict[str, FileEntry]:
    """Return the current size and checksum of files."""
    return {name: FileEntry(size=(folder / name).stat().st_size, sha256=_digest(folder / name)) for name in names}


def publish(directory: Path, manifest: Manifest) -> Path:
    """Write the manifest, rename the unfinished checkpoint, replacing one of the same step, and return its path."""
    folder, place = unfinished(directory, manifest.step), directory / f"step-{manifest.step}"
    files = {name: asdict(entry) for name, entry in sorted(manifest.files.items())}
    record = {"version": 1, "step": manifest.step, "world_size": manifest.world_size, "files": files}
    (folder / MANIFEST).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    sync_file(folder / MANIFEST)
    sync_file(folder)
    if place.exists():
        old = directory / f"step-{manifest.step}.old"
        place.rename(old)
        folder.rename(place)
        old.rename(folder)
        _remove(folder)
    else:
        folder.rename(place)
    sync_file(directory)
    return place


def prune(directory: Path, *, newest: int, keep: int) -> None:
    """Keep the last ``keep`` checkpoints up to step ``newest``, and remove older ones. Leave newer steps alone."""
    for step in [step for step in found_steps(directory) if step <= newest][keep:]:
        gone = unfinished(directory, step)
        (directory / f"step-{step}").rename(gone)  # a partly removed checkpoint must not keep its name
        _remove(gone)


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest of a checkpoint. Raises ``OSError``, or ``ValueError`` if it is not valid."""
    try:
        record: dict[str, Any] = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        files = {
            name: FileEntry(size=int(entry["size"]), sha256=str(entry["sha256"])) for name, entry in record["files"].items()
        }
        return Manifest(step=int(record["step"]), world_size=int(record["world_size"]), files=files)
    except KeyError as error:
        raise ValueError(f"{MANIFEST} is damaged: it has no key {error}") from error
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"{MANIFEST} is damaged: {error}") from error


def find_problems(folder: Path, manifest: Manifest, names: Sequence[str]) -> list[str]:
    """Return the problems of the named files of a checkpoint."""
    problems = []
    for name in names:
        wanted, path = manifest.files[name], folder / name
        try:
            size = path.stat().st_size
            if size != wanted.size:
                problems.append(f"{name} has {size} bytes, not {wanted.size}")
            elif _digest(path) != wanted.sha256:
                problems.append(f"the checksum of {name} differs from the one in {MANIFEST}")
        except OSError as error:
            problems.append(f"{name}: {error.strerror}")
    return problems


def sync_file(path: Path) -> None:
    """Flush a file, or the entries of a directory, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove(folder: Path) -> None:
    """Remove a directory. This may fail on NFS while a file in it is read; the next save tries again."""
    try:
        shutil.rmtree(folder)
    except OSError as error:
        warnings.warn(f"{folder} could not be removed (the next save tries again): {error}", stacklevel=2)


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        while data := file.read(_CHUNK):
            digest.update(data)
    return digest.hexdigest()
