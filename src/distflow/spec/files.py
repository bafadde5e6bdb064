"""The ``files`` of a task: where each appears, and the text, bytes or local path that it is made from."""

from __future__ import annotations

import base64
import binascii
import os
import posixpath
import stat
from collections.abc import Iterator
from pathlib import Path

from distflow.documents.document import Text, View
from distflow.documents.problems import ProblemsFound
from distflow.documents.source import read_bytes
from distflow.spec.model import FileSpec

__all__ = ["parse_files"]

_BASE64_LIMIT = 64 << 20
_OUTPUT = "/osmo/data/output/"


def parse_files(task: View, base_dir: Path) -> tuple[FileSpec, ...]:
    """Return the files of a task; ``base_dir`` is the directory that their ``localpath`` is relative to."""
    return tuple(_without_clashes(task, base_dir))


def _without_clashes(task: View, base_dir: Path) -> Iterator[FileSpec]:
    taken: dict[str, tuple[int, bool]] = {}
    for entry in task.views("files"):
        file = _parse_file(entry, base_dir)
        if file is None:
            continue
        place = posixpath.normpath(file.path.value)
        line = entry.key_mark("path").line
        if place in taken:
            entry.add(
                f"the path `{place}` is given twice: line {taken[place][0]} has it already", "keep one of them", key="path"
            )
            continue
        for other, (other_line, other_is_directory) in taken.items():
            inner, outer, outer_is_directory = (
                (place, other, other_is_directory) if place.startswith(f"{other}/") else (other, place, file.is_directory)
            )
            if inner.startswith(f"{outer}/") and not outer_is_directory:
                entry.add(
                    f"`{inner}` lies inside `{outer}`, which is a file (line {other_line if outer == other else line})",
                    "give one of them another path",
                    key="path",
                )
        taken[place] = (line, file.is_directory)
        yield file


def _parse_file(entry: View, base_dir: Path) -> FileSpec | None:
    path = entry.text("path")
    contents, local = entry.text("contents"), entry.text("localpath")
    if path is None or not _path_is_good(entry, path) or (contents is None) == (local is None):
        return None
    encoded = bool(entry.flag("base64"))
    if contents is not None:
        if encoded:
            return FileSpec(path=path, data=_decoded(entry, contents.value, "contents"))
        return FileSpec(path=path, contents=contents)
    found = _local_path(entry, local, base_dir) if local is not None else None
    if found is None:
        return None
    is_directory = os.path.isdir(found)
    if encoded and not is_directory:
        try:
            data = read_bytes(found, limit=_BASE64_LIMIT)
        except ProblemsFound as error:
            entry.add(error.problems[0].message, error.problems[0].hint, key="localpath")
            return None
        return FileSpec(path=path, data=_decoded(entry, data, "localpath"))
    if not is_directory and (path.value.endswith("/") or posixpath.normpath(path.value) in (".", "/")):
        entry.add(
            f"`path: {path.value}` names a directory, but `localpath` is a file",
            "write the file's own name at the end",
            key="path",
        )
        return None
    return FileSpec(path=path, local_path=found, is_directory=is_directory)


def _path_is_good(entry: View, path: Text) -> bool:
    value = path.value
    parts = [part for part in value.split("/") if part not in ("", ".")]
    if not value.strip():
        entry.add("`path` is empty", "say where the file appears, such as `/tmp/entry.sh` or `train.py`", key="path")
    elif "\0" in value or "\n" in value:
        entry.add("`path` holds a line break or a NUL", "write it as one line", key="path")
    elif ".." in parts:
        entry.add(f"`path: {value}` leaves its directory with `..`", "write the path without `..`", key="path")
    elif value.startswith("~"):
        entry.add(
            f"`path: {value}` begins with `~`, which means nothing here",
            "write a path relative to the task's directory, or an absolute one",
            key="path",
        )
    elif parts[:1] == ["osmo"] and not value.startswith(_OUTPUT):
        entry.add(
            f"`path: {value}` lies below `/osmo`, which is reserved",
            f"choose another directory; only `{_OUTPUT}` is open",
            key="path",
        )
    elif (value.endswith("/") or not parts) and not entry.has("localpath"):
        entry.add(f"`path: {value}` names a directory", "write the file's own name at the end", key="path")
    else:
        return True
    return False


def _decoded(entry: View, value: str | bytes, key: str) -> bytes:
    try:
        data = value.encode() if isinstance(value, str) else value
        return base64.b64decode(b"".join(data.split()), validate=True)
    except (binascii.Error, ValueError) as error:
        entry.add(f"`{key}` is not base64: {error}", "remove `base64: true`, or encode it with `base64 -w0`", key=key)
        return b""


def _local_path(entry: View, written: Text, base_dir: Path) -> str | None:
    """Return the absolute path of what ``localpath`` names, if it can be sent."""
    try:
        path = Path(written.value).expanduser()
    except RuntimeError:
        entry.add(f"`localpath: {written.value}`: no such user", "write the path itself", key="localpath")
        return None
    path = Path(os.path.abspath(base_dir / path))
    try:
        mode = path.stat().st_mode
    except (OSError, ValueError) as error:
        said = error.strerror or "" if isinstance(error, OSError) else "it holds a NUL"
        missing = isinstance(error, FileNotFoundError)
        message = f"`localpath: {written.value}`: " + (
            "there is no such file or directory" if missing else f"it cannot be read: {said}"
        )
        entry.add(message, f"it was looked for at {path}; paths are relative to the spec's directory", key="localpath")
        return None
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        entry.add(
            f"`localpath: {written.value}` is neither a file nor a directory",
            "pipes, sockets and devices cannot be sent",
            key="localpath",
        )
        return None
    if not os.access(path, os.R_OK | (os.X_OK if stat.S_ISDIR(mode) else 0)):
        entry.add(f"`localpath: {written.value}` cannot be read: permission denied", f"make {path} readable", key="localpath")
        return None
    return str(path)
