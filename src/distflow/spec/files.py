"""The ``files`` of tasks: parse the entries, and store the files of this machine that a spec sends.

Files are read at submission and stored by digest, so later edits have no effect. Unchanged directories and large files
are not read again (``spec.unchanged``). A directory becomes one gzipped tar with names in order and without times and owners,
so equal content has an equal digest. The following parts of a directory are not sent: files that match ``exclude`` or a
``.gitignore`` in it, ``.git``, sockets, pipes, devices, logs of distflow's Slurm jobs, and directories of distflow itself
(state directories, fetched results, and directories that distflow uses if this machine is a node).

``distflow.train`` is sent as well if a task needs it, in one archive with the other modules for tasks (``distributed``,
``ray_cluster`` and ``protocol``). The archive has its own ``distflow/__init__.py``, which also finds a distflow that is
installed on the node. ``distflow.train`` itself is the version of the submitting machine.
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
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, BinaryIO, cast

from msgspec import Struct

import distflow
from distflow.documents.document import Text, View
from distflow.documents.problems import Problem, ProblemsFound
from distflow.documents.source import read_bytes
from distflow.errors import StateError
from distflow.runtime.files.root_directory import is_marked
from distflow.runtime.files.safe_files import publish
from distflow.spec.compression import ParallelGzip
from distflow.spec.model import FileSpec, GroupSpec, TaskSpec, WorkflowSpec
from distflow.spec.unchanged import PathRecord
from distflow.structs import replace

if TYPE_CHECKING:
    from pathspec import GitIgnoreSpec

__all__ = [
    "LIBRARY",
    "Bundle",
    "OnPack",
    "bundle_files",
    "library_archive",
    "needs_library",
    "parse_files",
]


_BASE64_LIMIT = 64 << 20
_OUTPUT = "/osmo/data/output/"


def parse_files(task: View, base_dir: Path) -> tuple[FileSpec, ...]:
    """Return the files of a task, whose ``localpath`` is relative to ``base_dir``. Add findings for invalid entries."""
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
                f"the path `{place}` is given twice: it is also in line {taken[place][0]}",
                "remove one of the entries",
                key="path",
            )
            continue
        for other, (other_line, other_is_directory) in taken.items():
            inner, outer, outer_is_directory = (
                (place, other, other_is_directory) if place.startswith(f"{other}/") else (other, place, file.is_directory)
            )
            if inner.startswith(f"{outer}/") and not outer_is_directory:
                entry.add(
                    f"`{inner}` is inside `{outer}`, which is a file (line {other_line if outer == other else line})",
                    "change one of the paths",
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
            data = read_bytes(found, limit=_BASE64_LIMIT, kind="base64 file, or decode it and send it without `base64`")
        except ProblemsFound as error:
            entry.add(error.problems[0].message, error.problems[0].hint, key="localpath")
            return None
        return FileSpec(path=path, data=_decoded(entry, data, "localpath"))
    if not is_directory and (path.value.endswith("/") or posixpath.normpath(path.value) in (".", "/")):
        entry.add(
            f"`path: {path.value}` is a directory, but `localpath` is a file",
            "add the name of the file at the end",
            key="path",
        )
        return None
    exclude = tuple(text.value for text in entry.texts("exclude"))
    if exclude and not is_directory:
        hint = "remove `exclude`, or name a directory"
        entry.add(
            f"`exclude` needs a directory, but `localpath: {local.value if local else ''}` is a file", hint, key="exclude"
        )
    return FileSpec(path=path, local_path=found, is_directory=is_directory, exclude=exclude)


def _path_is_good(entry: View, path: Text) -> bool:
    """Return whether a ``path`` is valid, and add a finding if it is not."""
    value = path.value
    parts = [part for part in value.split("/") if part not in ("", ".")]
    if not value.strip():
        hint = "write the path at which the task finds the file, such as `/tmp/entry.sh` or `train.py`"
        entry.add("`path` is empty", hint, key="path")
    elif "\0" in value or "\n" in value:
        entry.add("`path` contains a line break or a NUL byte", "write it on one line", key="path")
    elif ".." in parts:
        entry.add(
            f"`path: {value}` contains `..`, which may leave the task's directory", "write the path without `..`", key="path"
        )
    elif value.startswith("~"):
        entry.add(
            f"`path: {value}` begins with `~`, which is not supported here",
            "write an absolute path, or a path relative to the task's directory",
            key="path",
        )
    elif parts[:1] == ["osmo"] and not value.startswith(_OUTPUT):
        entry.add(
            f"`path: {value}` cannot be used: the directories `/osmo` and `osmo` are reserved",
            f"choose another directory, or `{_OUTPUT}`",
            key="path",
        )
    elif (value.endswith("/") or not parts) and not entry.has("localpath"):
        entry.add(f"`path: {value}` is a directory", "add the name of the file at the end", key="path")
    else:
        return True
    return False


def _decoded(entry: View, value: str | bytes, key: str) -> bytes:
    try:
        data = value.encode() if isinstance(value, str) else value
        return base64.b64decode(b"".join(data.split()), validate=True)
    except (binascii.Error, ValueError) as error:
        entry.add(f"`{key}` is not base64: {error}", "remove `base64: true`, or encode it with `base64`", key=key)
        return b""


def _local_path(entry: View, written: Text, base_dir: Path) -> str | None:
    """Return the absolute path of a ``localpath``; ``None``, after a finding, if it cannot be sent."""
    try:
        path = Path(written.value).expanduser()
    except RuntimeError:
        entry.add(f"`localpath: {written.value}`: the user does not exist", "write the path without `~user`", key="localpath")
        return None
    path = Path(os.path.abspath(base_dir / path))
    try:
        mode = path.stat().st_mode
    except (OSError, ValueError) as error:
        reason = error.strerror or "" if isinstance(error, OSError) else "it contains a NUL byte"
        missing = isinstance(error, FileNotFoundError)
        message = f"`localpath: {written.value}`: " + (
            "the file or directory does not exist" if missing else f"it cannot be read: {reason}"
        )
        entry.add(message, f"check the path: distflow looked for `{path}`", key="localpath")
        return None
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        entry.add(
            f"`localpath: {written.value}` is neither a file nor a directory",
            "name a file or directory; pipes, sockets and devices cannot be sent",
            key="localpath",
        )
        return None
    if not os.access(path, os.R_OK | (os.X_OK if stat.S_ISDIR(mode) else 0)):
        entry.add(f"`localpath: {written.value}` cannot be read: permission denied", f"make `{path}` readable", key="localpath")
        return None
    return str(path)


# -- storing files ----------------------------------------------------------------------------------------------------

_TEXT_LIMIT = 1 << 20
"""The maximum size of a text whose tokens are replaced, in bytes, as in OSMO."""

RESULTS_MARKER = ".distflow-results"
"""A file in directories with fetched results. Such directories are not sent."""
_JOB_LOG = re.compile(r"distflow-job-[0-9]+\.log")
"""A file with messages of a job of Slurm, in the ``root`` of its pool. It is not sent."""
_STATE_FILE = "distflow.sqlite3"
"""A file in every state directory. A state directory is not sent, because it contains secrets and earlier sent files."""

_CHUNK = 1 << 20


class Bundle(Struct, frozen=True, kw_only=True):
    """One file or directory in the form in which it is sent."""

    digest: str
    """The SHA-256 of the content; for a directory, of its archive."""
    size: int
    """Bytes of the content or of the archive."""
    mode: int
    is_tar: bool = False
    text: str | None = None
    """The content, if it is short UTF-8 text."""


OnPack = Callable[[int, int], None]
"""Called with the number of bytes that have been read, and the total number that is known so far."""


class _ReadProgress:
    """The progress of reading files."""

    def __init__(self, report: OnPack) -> None:
        self._report = report
        self._done = self._total = 0

    def begin(self, size: int) -> None:
        """Add the size of files that will be read now."""
        self._total += size

    def reader(self, file: BinaryIO) -> BinaryIO:
        """Return the file, and count the bytes that are read from it as progress."""
        return cast("BinaryIO", _Counted(file, self._add))

    def _add(self, size: int) -> None:
        self._done += size
        self._report(self._done, self._total)


class _Counted:
    """A file that reports the number of bytes that are read."""

    def __init__(self, file: BinaryIO, report: Callable[[int], None]) -> None:
        self._file = file
        self._report = report

    def read(self, size: int = -1) -> bytes:
        data = self._file.read(size)
        self._report(len(data))
        return data


def _ignore(_done: int, _total: int) -> None:
    """Discard progress."""


def bundle_files(spec: WorkflowSpec, blobs: Path, on_pack: OnPack = _ignore) -> tuple[dict[str, Bundle], tuple[Problem, ...]]:
    """Store the files of the spec, one blob for each digest. Return the bundles by ``FileSpec.bundle``, and problems.

    Inline ``contents`` are stored only if they are base64: the spec contains the others. The key of ``distflow.train`` is
    ``LIBRARY``. A problem names the line of the entry in the spec. It reports a file that cannot be read, a file of a sent
    directory that became shorter while it was read, or a link that is absolute or leads out of the sent directory. Raises
    ``StateError`` if a blob cannot be written.
    """
    progress = _ReadProgress(on_pack)
    bundles: dict[str, Bundle] = {}
    problems: list[Problem] = []
    try:
        blobs.mkdir(parents=True, exist_ok=True, mode=0o700)
        blob_sizes = _sizes(blobs)
        if _sends_library(spec):
            bundles[LIBRARY] = replace(_store_bytes(library_archive(), blobs), mode=0o700, is_tar=True)
    except OSError as error:
        raise StateError(
            f"cannot store the files of the spec in `{error.filename or blobs}`: {error.strerror or error}"
        ) from error
    for file in _files(spec):
        key = file.bundle
        if key in bundles:
            continue
        try:
            if file.local_path is None:
                bundles[key] = _store_bytes(file.data or b"", blobs)
            elif file.is_directory:
                bundles[key] = _store_tree(Path(file.local_path), file.exclude, blobs, progress)
            else:
                bundles[key] = _store_file(Path(file.local_path), blobs, blob_sizes, progress)
        except _LinkOutside as error:
            hint = "name it in `.gitignore` or in `exclude`, or replace the link with a copy of its target"
            problems.append(Problem(where=file.path.mark, message=str(error), hint=hint))
        except _Shortened as error:
            hint = "submit again when no program writes to the file, or name it in `.gitignore` or in `exclude`"
            problems.append(Problem(where=file.path.mark, message=str(error), hint=hint))
        except OSError as error:
            if error.filename is None or str(blobs) in str(error.filename):
                raise StateError(
                    f"cannot copy `{file.local_path or file.path.value}` to `{blobs}`: {error.strerror or error}"
                ) from error
            message = f"cannot read `{error.filename}`: {error.strerror}"
            hint = "make the file readable, or remove it from `files`, or name it in `exclude` of its directory"
            problems.append(Problem(where=file.path.mark, message=message, hint=hint))
    return bundles, tuple(problems)


class _LinkOutside(Exception):
    """A directory contains an absolute link, or a link to a path outside of it. Nodes refuse archives with such links."""


class _Shortened(Exception):
    """A file in a directory became shorter while it was read."""


def _files(spec: WorkflowSpec) -> Iterator[FileSpec]:
    for group in spec.groups:
        for task in group.tasks:
            yield from (file for file in task.files if file.contents is None)


@contextlib.contextmanager
def _part(blobs: Path) -> Iterator[IO[bytes]]:
    """Open a new file in ``blobs``, which the caller renames when it is complete. After an error it is deleted."""
    with tempfile.NamedTemporaryFile(dir=blobs, delete=False) as part:
        try:
            yield part
        except BaseException:
            os.unlink(part.name)
            raise


def _is_whole(path: Path, size: int) -> bool:
    """Return whether a blob is complete. Earlier versions of distflow could leave incomplete blobs after a power failure."""
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
    """Return the sizes of all blobs. Other processes may add and remove blobs at the same time."""
    sizes = set()
    with os.scandir(blobs) as entries:
        for entry in entries:
            with contextlib.suppress(FileNotFoundError):
                sizes.add(entry.stat().st_size)
    return frozenset(sizes)


def _store_file(path: Path, blobs: Path, blob_sizes: Container[int], progress: _ReadProgress) -> Bundle:
    with path.open("rb") as source:
        status = os.fstat(source.fileno())
        record = PathRecord(blobs, str(path), [("", status)]) if status.st_size > _TEXT_LIMIT else None
        if record is not None and (stored := record.find()) is not None:
            return Bundle(digest=stored[0], size=stored[1], mode=_mode(source.read(2), status.st_mode))
        progress.begin(status.st_size)
        if status.st_size in blob_sizes:
            # A blob of this size exists. If it has the same digest, only reading is needed.
            digest, size, head = _read(progress.reader(source), None)
            if _is_whole(blobs / digest, size):
                if record is not None:
                    record.remember(digest, size)
                return Bundle(digest=digest, size=size, mode=_mode(head, status.st_mode), text=_as_text(head))
            source.seek(0)
            progress.begin(status.st_size)
        with _part(blobs) as sink:
            digest, size, head = _read(progress.reader(source), sink)
            publish(sink, str(blobs / digest))
    if record is not None:
        record.remember(digest, size)
    return Bundle(digest=digest, size=size, mode=_mode(head, status.st_mode), text=_as_text(head))


def _read(source: BinaryIO, sink: IO[bytes] | None) -> tuple[str, int, bytes]:
    """Read to the end, and copy to ``sink`` if given. Return the digest, the size, and the beginning, which may be text."""
    head = source.read(_TEXT_LIMIT + 1)
    hasher, size, chunk = hashlib.sha256(), 0, head
    while chunk:
        hasher.update(chunk)
        size += len(chunk)
        if sink is not None:
            sink.write(chunk)
        chunk = source.read(_CHUNK)
    return hasher.hexdigest(), size, head


def _store_tree(root: Path, exclude: Sequence[str], blobs: Path, progress: _ReadProgress) -> Bundle:
    entries = [
        (name, entry.stat(follow_symlinks=False))
        for name, entry in _tree(str(root), "", [("", _patterns(exclude))] if exclude else [])
    ]
    for name, info in entries:
        if stat.S_ISLNK(info.st_mode):
            _check_link(root, name)
    record = PathRecord(blobs, "\0".join((str(root), *exclude)), entries)
    if (stored := record.find()) is not None:
        return Bundle(digest=stored[0], size=stored[1], mode=0o700, is_tar=True)
    progress.begin(sum(info.st_size for _, info in entries if stat.S_ISREG(info.st_mode)))
    with _part(blobs) as sink:
        with (
            ParallelGzip(sink) as packed,
            tarfile.open(fileobj=cast("IO[bytes]", packed), mode="w|", format=tarfile.PAX_FORMAT, bufsize=_CHUNK) as archive,
        ):
            archive.copybufsize = _CHUNK  # type: ignore[attr-defined]  # small writes to its buffer would copy the buffer each time
            for name, _ in entries:
                _add(archive, root / name, name, progress)
        size = sink.tell()
        publish(sink, str(blobs / packed.digest))
    record.remember(packed.digest, size)
    return Bundle(digest=packed.digest, size=size, mode=0o700, is_tar=True)


def _check_link(root: Path, name: str) -> None:
    target = os.readlink(root / name)
    if target.startswith("/") or posixpath.normpath(posixpath.join(posixpath.dirname(name), target)).split("/")[0] == "..":
        raise _LinkOutside(f"cannot send the link `{root / name}`: `{target}` is absolute, or outside of the sent directory")


def _add(archive: tarfile.TarFile, path: Path, name: str, progress: _ReadProgress) -> None:
    if stat.S_ISSOCK(path.lstat().st_mode):
        return  # tar cannot store sockets; pipes and devices are skipped below
    info = archive.gettarinfo(str(path), arcname=name)
    info.uid = info.gid = info.mtime = 0
    info.uname = info.gname = ""
    if info.islnk():
        # A hard link becomes a separate file.
        info.type, info.linkname, info.size = tarfile.REGTYPE, "", path.stat().st_size
    if info.isreg():
        with path.open("rb") as source:
            try:
                archive.addfile(info, progress.reader(source))
            except OSError as error:
                if error.errno is None:  # tarfile has read fewer bytes than the size in the header
                    raise _Shortened(f"`{path}` became shorter while it was read") from error
                raise
    elif info.isdir() or info.issym():
        archive.addfile(info)


def _tree(root: str, folder: str, rules: list[tuple[str, GitIgnoreSpec]]) -> Iterator[tuple[str, os.DirEntry[str]]]:
    """Yield the entries of a directory that are not excluded, with names relative to ``root``.

    A directory comes before its entries. Sockets, pipes and devices are also yielded, although they are not sent.

    ``folder`` is the relative name of the directory with a slash at its end, or empty. ``rules`` are the patterns of ignored
    files, each with the directory that it applies to, in the same form.
    """
    ignore = Path(root, folder, ".gitignore")
    if ignore.is_file():
        lines = ignore.read_text(encoding="utf-8", errors="replace").splitlines()
        rules = [*rules, (folder, _patterns(lines))]
    with os.scandir(os.path.join(root, folder)) as found:
        entries = sorted(found, key=lambda entry: entry.name)
    for entry in entries:
        name, is_tree = folder + entry.name, entry.is_dir(follow_symlinks=False)
        tested = f"{name}/" if is_tree else name
        if entry.name == ".git" or any(rule.match_file(tested[len(base) :]) for base, rule in rules):
            continue
        if _is_own(entry.path) if is_tree else _JOB_LOG.fullmatch(entry.name):
            continue
        yield name, entry
        if is_tree:
            yield from _tree(root, tested, rules)


def _is_own(directory: str) -> bool:
    """Return whether a directory is distflow's own: fetched results, a state directory, or distflow's directory on a node."""
    return any(os.path.lexists(os.path.join(directory, name)) for name in (RESULTS_MARKER, _STATE_FILE)) or is_marked(directory)


def _patterns(lines: Iterable[str]) -> GitIgnoreSpec:
    import pathspec  # noqa: PLC0415  only directories need it, and most specs send none

    return pathspec.GitIgnoreSpec.from_lines(filter(_is_pattern, lines))


def _is_pattern(line: str) -> bool:
    """Return whether a line of a ``.gitignore`` is a valid pattern. git ignores invalid patterns such as `!` and `[z-a]`."""
    import pathspec  # noqa: PLC0415  as above

    try:
        pathspec.GitIgnoreSpec.from_lines([line])
    except (ValueError, re.error):
        return False
    return True


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
"""The key of the archive among the bundles of a spec. All other keys begin with an absolute path or a SHA-256."""

_PACKAGE = """\
\"\"\"Modules for tasks, from the submitting machine. The distflow that is installed here has all others.\"\"\"

from pkgutil import extend_path

__path__ = extend_path(__path__, __name__)
__version__ = {version!r}
"""


def _sends_library(spec: WorkflowSpec) -> bool:
    """Return whether any task of the spec needs the archive."""
    return any(needs_library(group, task) for group in spec.groups for task in group.tasks)


def needs_library(group: GroupSpec, task: TaskSpec) -> bool:
    """Return whether a task needs ``distflow.train``: with the launcher ``spawn``, a framework or a strategy."""
    return task.launcher.kind == "spawn" or group.framework is not None or group.strategy is not None


def library_archive() -> bytes:
    """Return ``distflow.train`` and the other modules for tasks as a gzipped tar. Equal sources give equal bytes."""
    top = Path(distflow.__file__).parent
    modules = [
        top / "distributed.py",
        top / "ray_cluster.py",
        *(top / "protocol").rglob("*.py"),
        *(top / "train").rglob("*.py"),
    ]
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
