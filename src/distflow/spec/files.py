"""The ``files`` of tasks: parse the entries, and store the files of this machine that a spec sends.

Files are read once, at submission, and stored by digest, so later edits have no effect. A directory becomes one gzipped tar
with names in order and without times and owners, so equal content has an equal digest. ``.gitignore`` files in it are honored,
and ``.git`` is never sent.

``distflow.train`` is sent as well, as one archive, if a task needs it. The archive has its own ``distflow/__init__.py``, which
also finds a distflow that is installed on the node. ``distflow.train`` itself is always the version of the submitting machine.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import gzip
import hashlib
import io
import os
import posixpath
import re
import stat
import tarfile
import tempfile
from collections.abc import Container, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, BinaryIO

import distflow
from distflow.documents.document import Text, View
from distflow.documents.problems import Problem, ProblemsFound
from distflow.documents.source import read_bytes
from distflow.errors import StateError
from distflow.runtime.files.safe_files import publish
from distflow.spec.model import FileSpec, GroupSpec, TaskSpec, WorkflowSpec

if TYPE_CHECKING:
    from pathspec import GitIgnoreSpec

__all__ = [
    "LIBRARY",
    "Bundle",
    "bundle_files",
    "library_archive",
    "needs_library",
    "parse_files",
]


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


# -- storing files ----------------------------------------------------------------------------------------------------

_TEXT_LIMIT = 1 << 20
"""Bytes up to which a single file may be text whose tokens are filled in, as OSMO does it."""

_CHUNK = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Bundle:
    """One file or directory, as it is sent."""

    digest: str
    """SHA-256 of the content; for a directory of its archive."""
    size: int
    """Bytes of the content or of the archive."""
    mode: int
    is_tar: bool = False
    text: str | None = None
    """The content, when it is small UTF-8 text."""


def bundle_files(spec: WorkflowSpec, blobs: Path) -> tuple[dict[str, Bundle], tuple[Problem, ...]]:
    """Store all files that the spec sends in ``blobs`` (one file per digest) and return them by their path on this machine.

    Inline base64 files are returned by their path in the spec, and ``distflow.train`` by its name. A file that cannot be read
    is a problem at its place in the spec. Raises ``StateError`` if ``blobs`` cannot be written.
    """
    blobs.mkdir(parents=True, exist_ok=True, mode=0o700)
    kept = _sizes(blobs)
    bundles: dict[str, Bundle] = {}
    problems: list[Problem] = []
    if _sends_library(spec):
        bundles[LIBRARY] = replace(_store_bytes(library_archive(), blobs), mode=0o700, is_tar=True)
    for file in _files(spec):
        key = file.local_path or file.path.value
        if key in bundles:
            continue
        try:
            if file.local_path is None:
                bundles[key] = _store_bytes(file.data or b"", blobs)
            elif file.is_directory:
                bundles[key] = _store_tree(Path(file.local_path), blobs)
            else:
                bundles[key] = _store_file(Path(file.local_path), blobs, kept)
        except OSError as error:
            if error.filename is None or str(blobs) in str(error.filename):
                raise StateError(f"cannot copy {key} to {blobs}: {error.strerror or error}") from error
            message = f"cannot read {error.filename}: {error.strerror}"
            problems.append(Problem(where=file.path.mark, message=message, hint="make it readable, or do not send it"))
    return bundles, tuple(problems)


def _files(spec: WorkflowSpec) -> Iterator[FileSpec]:
    for group in spec.groups:
        for task in group.tasks:
            yield from (file for file in task.files if file.contents is None)


@contextlib.contextmanager
def _part(blobs: Path) -> Iterator[IO[bytes]]:
    """Open a new file in ``blobs``, which the caller renames when it is complete; after an error it is deleted."""
    with tempfile.NamedTemporaryFile(dir=blobs, delete=False) as part:
        try:
            yield part
        except BaseException:
            os.unlink(part.name)
            raise


def _is_whole(path: Path, size: int) -> bool:
    """Return whether a blob is complete. An earlier version left shorter ones after a power failure."""
    try:
        return path.stat().st_size == size
    except FileNotFoundError:
        return False


def _store_bytes(data: bytes, blobs: Path) -> Bundle:
    digest = hashlib.sha256(data).hexdigest()
    with _part(blobs) as sink:
        sink.write(data)
        publish(sink, str(blobs / digest))
    return Bundle(digest=digest, size=len(data), mode=_mode(data, 0), text=_as_text(data))


def _sizes(blobs: Path) -> frozenset[int]:
    """Return the sizes of what is kept. Others add and remove files of the folder meanwhile."""
    sizes = set()
    with os.scandir(blobs) as entries:
        for entry in entries:
            with contextlib.suppress(FileNotFoundError):
                sizes.add(entry.stat().st_size)
    return frozenset(sizes)


def _store_file(path: Path, blobs: Path, kept: Container[int]) -> Bundle:
    with path.open("rb") as source:
        status = os.fstat(source.fileno())
        if status.st_size in kept:
            # It may lie there already: reading is all that this takes then.
            digest, size, head = _read(source, None)
            if _is_whole(blobs / digest, size):
                return Bundle(digest=digest, size=size, mode=_mode(head, status.st_mode), text=_as_text(head))
            source.seek(0)
        with _part(blobs) as sink:
            digest, size, head = _read(source, sink)
            publish(sink, str(blobs / digest))
    return Bundle(digest=digest, size=size, mode=_mode(head, status.st_mode), text=_as_text(head))


def _read(source: BinaryIO, sink: IO[bytes] | None) -> tuple[str, int, bytes]:
    """Read to the end, into ``sink`` too when there is one; return digest, size and as much as may be text."""
    head = source.read(_TEXT_LIMIT + 1)
    hasher, size, chunk = hashlib.sha256(), 0, head
    while chunk:
        hasher.update(chunk)
        size += len(chunk)
        if sink is not None:
            sink.write(chunk)
        chunk = source.read(_CHUNK)
    return hasher.hexdigest(), size, head


def _store_tree(root: Path, blobs: Path) -> Bundle:
    hasher = hashlib.sha256()
    with _part(blobs) as sink:
        with (
            gzip.GzipFile(filename="", mode="wb", fileobj=sink, compresslevel=3, mtime=0) as packed,
            tarfile.open(fileobj=packed, mode="w|", format=tarfile.PAX_FORMAT) as archive,
        ):
            for path in _tree(root, root, []):
                _add(archive, path, path.relative_to(root).as_posix())
        sink.flush()
        size = sink.tell()
        with open(sink.name, "rb") as stored:
            while chunk := stored.read(_CHUNK):
                hasher.update(chunk)
        publish(sink, str(blobs / hasher.hexdigest()))
    return Bundle(digest=hasher.hexdigest(), size=size, mode=0o700, is_tar=True)


def _add(archive: tarfile.TarFile, path: Path, name: str) -> None:
    if stat.S_ISSOCK(path.lstat().st_mode):
        return  # as pipes and devices are left out; tar itself has no word for it
    info = archive.gettarinfo(str(path), arcname=name)
    info.uid = info.gid = info.mtime = 0
    info.uname = info.gname = ""
    if info.islnk():
        # The second name of a file; it is a file of its own where it goes.
        info.type, info.linkname, info.size = tarfile.REGTYPE, "", path.stat().st_size
    if info.isreg():
        with path.open("rb") as source:
            archive.addfile(info, source)
    elif info.isdir() or info.issym():
        archive.addfile(info)


def _tree(root: Path, folder: Path, rules: list[tuple[Path, GitIgnoreSpec]]) -> Iterator[Path]:
    import pathspec  # noqa: PLC0415  only directories need it, and most specs send none

    ignore = folder / ".gitignore"
    if ignore.is_file():
        lines = ignore.read_text(encoding="utf-8", errors="replace").splitlines()
        rules = [*rules, (folder, pathspec.GitIgnoreSpec.from_lines(filter(_is_pattern, lines)))]
    for path in sorted(folder.iterdir()):
        is_tree = path.is_dir() and not path.is_symlink()
        if path.name == ".git" or any(_ignored(path, is_tree, base, rule) for base, rule in rules):
            continue
        yield path
        if is_tree:
            yield from _tree(root, path, rules)


def _is_pattern(line: str) -> bool:
    """Return whether a line of a ``.gitignore`` can match at all; git passes over those that cannot (`!`, `[z-a]`)."""
    import pathspec  # noqa: PLC0415  as above

    try:
        pathspec.GitIgnoreSpec.from_lines([line])
    except (ValueError, re.error):
        return False
    return True


def _ignored(path: Path, is_tree: bool, base: Path, rule: GitIgnoreSpec) -> bool:
    return rule.match_file(path.relative_to(base).as_posix() + ("/" if is_tree else ""))


def _as_text(data: bytes) -> str | None:
    if len(data) > _TEXT_LIMIT or b"\0" in data:
        return None
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return None


def _mode(head: bytes, status_mode: int) -> int:
    return 0o700 if head[:2] == b"#!" or status_mode & 0o100 else 0o600


# -- distflow.train as an archive -------------------------------------------------------------------------------------

LIBRARY = "distflow.train"
"""Name of the archive among those of a spec, which are named by their paths."""

_PACKAGE = """\
\"\"\"distflow.train, as distflow brings it; the rest is the distflow that is installed here, if any.\"\"\"

from pkgutil import extend_path

__path__ = extend_path(__path__, __name__)
__version__ = {version!r}
"""


def _sends_library(spec: WorkflowSpec) -> bool:
    """Return whether any task of the spec needs the archive."""
    return any(needs_library(group, task) for group in spec.groups for task in group.tasks)


def needs_library(group: GroupSpec, task: TaskSpec) -> bool:
    """Return whether a task gets ``distflow.train``: its launcher is ``spawn``, or its group has a framework or strategy."""
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
