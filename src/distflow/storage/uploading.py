"""Files of this machine, written to a URL; what is there already with the same content is not sent again."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from distflow.documents.urls import StorageUrl
from distflow.errors import StorageError, StorageUnreachable
from distflow.storage.base import Progress, Store, nothing_told
from distflow.storage.downloading import Moved
from distflow.storage.failures import local_errors
from distflow.storage.selecting import compile_regex
from distflow.storage.sums import is_equal
from distflow.storage.trying import Gauge, Patience, for_all

__all__ = ["Source", "sources", "upload"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A file to write."""

    path: Path
    """With all links resolved: it is opened as it stands here, and a link that takes its place is not followed."""
    name: str
    """Where, relative to the URL."""
    size: int


def sources(paths: Iterable[Path], regex: str = "", *, contents: bool = False, only_files: bool = False) -> tuple[Source, ...]:
    """Return the files at and below some paths, of which ``regex`` matches the name from its start.

    A directory keeps its name; with ``contents`` what it holds is meant. Links are followed. Raises ``StorageError`` for what
    cannot be read, is no file or directory (``only_files`` leaves that out), or leads in a circle, and for two files of one
    name.
    """
    pattern = compile_regex(regex)
    found: dict[str, Source] = {}
    for path in paths:
        with local_errors(path):
            # What is called `.` or `..` has its own name all the same.
            own = path.resolve().name if path.name in ("", "..") else path.name
            top = "" if contents and path.is_dir() else own
            for one in _walk(path, top, (), only_files=only_files):
                if pattern is not None and not pattern.match(one.name):
                    continue
                if one.name in found:
                    raise StorageError(
                        f"{found[one.name].path} and {one.path} would both be {one.name}", hint="upload them apart"
                    )
                found[one.name] = one
    return tuple(found.values())


def upload(
    store: Store,
    url: StorageUrl,
    files: Sequence[Source],
    *,
    at_once: int = 8,
    patience: Patience | None = None,
    told: Progress = nothing_told,
) -> Moved:
    """Write files below a URL; each is looked at afterwards. Raises ``StorageError``, and ``Halted``."""
    patience = patience or Patience()
    gauge = Gauge(sum(one.size for one in files), told)
    there = {entry.key: entry for entry in patience.keep_trying(lambda: store.find(url.key))} if files else {}

    def send(one: Source) -> bool:
        goal = url.below(one.name)
        if goal.key in there and is_equal(one.path, there[goal.key]):
            gauge.add(one.size)
            return True
        patience.keep_trying(lambda: _write(store, goal, one, patience, gauge))
        return False

    were_there = for_all(files, send, at_once, patience)
    return Moved(files=len(files), size=sum(one.size for one in files), skipped=sum(were_there))


def _write(store: Store, goal: StorageUrl, one: Source, patience: Patience, gauge: Gauge) -> None:
    sent = 0

    def told(count: int) -> None:
        nonlocal sent
        patience.check()
        sent += count
        gauge.add(count)

    try:
        with local_errors(one.path):
            before = one.path.lstat()
        if not stat.S_ISREG(before.st_mode):
            raise StorageError(f"{one.path} is not a regular file any longer", hint="upload it again")
        store.write(goal.key, one.path, told)
        found = store.stat(goal.key)
        with local_errors(one.path):
            after = one.path.lstat()
        if (before.st_ino, before.st_size, before.st_mtime_ns) != (after.st_ino, after.st_size, after.st_mtime_ns):
            raise StorageError(f"{one.path}: it was changed while it was sent to {goal}", hint="upload it again")
        if found.size != before.st_size or is_equal(one.path, found) is False:
            raise StorageUnreachable(f"{goal}: what is there now is not what was sent")
    except BaseException:
        gauge.add(-sent)
        raise
    gauge.add(one.size - sent)


def _walk(path: Path, name: str, above: tuple[tuple[int, int], ...], *, only_files: bool) -> Iterator[Source]:
    found = path.stat()
    if stat.S_ISREG(found.st_mode):
        if not os.access(path, os.R_OK):
            raise PermissionError(13, "Permission denied", os.fspath(path))
        yield Source(path=path.resolve(), name=name or path.name, size=found.st_size)
    elif stat.S_ISDIR(found.st_mode):
        identity = (found.st_dev, found.st_ino)
        if identity in above:
            raise StorageError(f"{path} leads back to a directory above it", hint="remove the link")
        for item in sorted(path.iterdir(), key=lambda one: os.fsencode(one.name)):
            below = f"{name}/{item.name}" if name else item.name
            yield from _walk(item, below, (*above, identity), only_files=only_files)
    elif not only_files:
        raise StorageError(f"{path} is no file and no directory", hint="leave it out")
