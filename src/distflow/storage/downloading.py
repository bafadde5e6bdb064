"""Data at a URL, fetched into a directory of this machine: each file whole and with the right sum, or not at all."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from distflow.documents.urls import StorageUrl
from distflow.errors import StorageError, StorageUnreachable
from distflow.runtime.files.safe_paths import inside
from distflow.runtime.files.unpacking import file_time
from distflow.runtime.wire import OpError
from distflow.storage.base import Entry, Progress, Store, nothing_told, part_name
from distflow.storage.failures import Halted, local_errors
from distflow.storage.selecting import Wanted, check_names, select, select_found
from distflow.storage.sums import is_equal, sha256
from distflow.storage.trying import Gauge, Patience, for_all

__all__ = ["Moved", "download", "find"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Moved:
    """What a transfer has done."""

    files: int = 0
    """That are at their goal now."""
    size: int = 0
    """Their bytes."""
    skipped: int = 0
    """Of them, those that were there already."""


def find(
    store: Store, url: StorageUrl, regex: str = "", *, may_be_empty: bool = False, patience: Patience | None = None
) -> tuple[Wanted, ...]:
    """Return what a URL means, of which ``regex`` matches the relative path.

    Raises ``StorageMissing`` when there is nothing at all at the URL, unless ``may_be_empty``.
    """
    found = (patience or Patience()).keep_trying(lambda: store.find(url.key))
    return select(url, found, regex) if may_be_empty else select_found(url, found, regex)


def download(
    store: Store,
    url: StorageUrl,
    target: Path,
    *,
    regex: str = "",
    sums: Mapping[str, str] | None = None,
    may_be_empty: bool = False,
    resume: bool = False,
    at_once: int = 8,
    patience: Patience | None = None,
    told: Progress = nothing_told,
) -> Moved:
    """Fetch what a URL means into the directory ``target``.

    With ``sums`` (SHA-256 by name), only these names are fetched. All of them must be there, and a file gets its name only when
    its content has that sum. With ``resume``, what is there with the right size and sum stays. A file that is half here is gone
    on with in any case, as long as the store has the same content. A file has the time that the store has for it.

    Raises ``StorageError``, and ``Halted`` when ``patience`` was called off.
    """
    patience = patience or Patience()
    found = find(store, url, regex, may_be_empty=may_be_empty, patience=patience)
    wanted = tuple(one for one in found if sums is None or one.name in sums)
    missing = sorted(set(sums or ()) - {one.name for one in wanted})
    if missing:
        raise StorageError(f"{url.below(missing[0])} is missing from the store", hint="a part of this version was removed")
    check_names(url, wanted)
    gauge = Gauge(sum(one.entry.size for one in wanted), told)
    with local_errors(target):
        target.mkdir(parents=True, exist_ok=True)
        places = _places(target, wanted)

    fetches = {
        one.name: _Fetch(store, url, one.entry, places[one.name], (sums or {}).get(one.name, ""), patience, gauge)
        for one in wanted
    }

    def fetch(one: Wanted) -> bool:
        if resume and fetches[one.name].is_there():
            gauge.add(one.entry.size)
            return True
        fetches[one.name].run()
        return False

    try:
        were_there = for_all(wanted, fetch, at_once, patience)
    except StorageError as error:
        if isinstance(error.__cause__, OSError):
            # A disk that is full is full for everybody else, too.
            for one in fetches.values():
                one.drop()
        raise
    return Moved(files=len(wanted), size=sum(one.entry.size for one in wanted), skipped=sum(were_there))


def _places(target: Path, wanted: Sequence[Wanted]) -> dict[str, Path]:
    """Return where each file goes, its directory made; a link that was there already leads nobody out."""
    places = {}
    known: set[str] = set()
    for one in wanted:
        try:
            places[one.name] = Path(inside(os.fspath(target), one.name, known))
        except OpError as error:
            raise StorageError(
                f"{one.name!r} cannot be kept below {target}: a link there leads out of it", hint="remove the link"
            ) from error
        places[one.name].parent.mkdir(parents=True, exist_ok=True)
    return places


class _Fetch:
    """One object on its way to a file."""

    def __init__(
        self, store: Store, url: StorageUrl, entry: Entry, path: Path, sha256: str, patience: Patience, gauge: Gauge
    ) -> None:
        self._store = store
        self._shown = url.shown(entry.key)
        self._entry = entry
        self._path = path
        self._sha256 = sha256
        # The part belongs to this content only: another one under the same key begins anew.
        mark = hashlib.sha256(f"{self._shown}\0{path.name}\0{entry.mark}\0{entry.size}".encode("utf-8", "surrogateescape"))
        self._part = path.with_name(part_name(mark.hexdigest()[:16]))
        self._patience = patience
        self._gauge = gauge
        self._here = 0
        """Bytes of it that the gauge knows of."""

    def is_there(self) -> bool:
        """Whether the file is complete from an earlier download."""
        if not self._path.is_file() or self._path.is_symlink():
            return False
        if self._sha256:
            return self._path.stat().st_size == self._entry.size and sha256(self._path) == self._sha256
        return bool(is_equal(self._path, self._entry))

    def run(self) -> None:
        try:
            with local_errors(self._path):
                self._patience.keep_trying(self._try, lambda: self._here)
        except (StorageError, Halted) as error:
            # Without a mark, the rest may be of another content.
            if isinstance(error.__cause__, OSError) or not self._entry.mark:
                self.drop()
            raise

    def drop(self) -> None:
        """Leave nothing of what is half here."""
        self._part.unlink(missing_ok=True)

    def _try(self) -> None:
        # Without a mark, nobody knows whether the rest belongs to what is here.
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | (0 if self._entry.mark else os.O_TRUNC)
        with os.fdopen(os.open(self._part, flags, 0o666), "r+b") as part:
            at = part.seek(0, os.SEEK_END)
            if at > self._entry.size:
                at = part.truncate(0)
            part.seek(at)
            self._count(at)

            def keep(piece: bytes) -> None:
                self._patience.check()
                part.write(piece)
                self._count(self._here + len(piece))

            if at < self._entry.size:
                self._store.read(self._entry, at, keep)
        self._check()
        if self._entry.modified is not None:
            os.utime(self._part, (file_time(self._entry.modified),) * 2)
        os.replace(self._part, self._path)

    def _count(self, here: int) -> None:
        self._gauge.add(here - self._here)
        self._here = here

    def _check(self) -> None:
        size = self._part.stat().st_size
        if size != self._entry.size:
            self._again(f"{size:,} bytes came of {self._entry.size:,}", keep=size < self._entry.size)
        if not is_equal(self._part, self._entry):
            # What the list says may be no sum of the content, or nothing: ask for this one.
            now = self._store.stat(self._entry.key)
            if now.mark != self._entry.mark or now.size != self._entry.size:
                self._again("it was changed while it was fetched", keep=False)
            if is_equal(self._part, now) is False:
                self._again("what came does not have the sum that the store tells", keep=False)
        if self._sha256 and sha256(self._part) != self._sha256:
            self.drop()
            raise StorageError(f"{self._shown} is not what was written there: its SHA-256 is another one")

    def _again(self, why: str, *, keep: bool) -> None:
        if not keep:
            self._part.unlink(missing_ok=True)
        raise StorageUnreachable(f"{self._shown}: {why}")
