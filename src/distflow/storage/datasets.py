"""Datasets: named collections of files below one URL, with versions that never change.

::

    <base>/claims/<name>/<n>.<upload id>   reserves the number; kept, so that no number is used twice
    <base>/data/<name>/<n>/<path>          the files; an update shares the unchanged files of the version that it extends
    <base>/versions/<name>/<n>.json        the manifest, written last: with it, the version exists and is complete
    <base>/turns/<name>/<upload id>        a lock of an update, held while it writes its manifest

Stores have no locks, so writers reserve a number optimistically: they write a claim and list the claims again. Of two
concurrent writers, at least one sees the other and withdraws its claim, so that no number is given twice. Updates of a dataset
take turns in the same way, so that no files are lost.
"""

from __future__ import annotations

import json
import random
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distflow.documents.text import plain
from distflow.documents.urls import StorageUrl, parse_dataset
from distflow.errors import NotFound, StorageError, StorageUnreachable
from distflow.runtime.untrusted import decode_object
from distflow.storage.base import DataStore, Progress, compile_regex, ignore_progress, select, why_not_a_file
from distflow.storage.failures import Retries, local_errors
from distflow.storage.files import UploadSource, sha256
from distflow.storage.transfers import TransferResult, delete, download, upload

__all__ = ["DatasetFile", "DatasetManifest", "Datasets", "Version"]

_CLAIMS, _DATA, _VERSIONS, _TURNS = "claims", "data", "versions", "turns"
_ROUNDS = 30
_MANIFEST_BYTES = 256 << 20
"""Enough for more than a million files."""
_LATEST_S = 253402300799
"""The last second of the year 9999."""
_SHOWN = 100
"""Characters of a path that an error message shows."""
_MOST_PAUSE_S = 0.5
_LONGEST_TURN_S = 600.0
"""An older turn counts as abandoned, because a turn only lists, reads and writes a few manifests."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Version:
    """One version in the list of versions."""

    name: str
    number: int
    at: float | None
    """The modification time of its manifest; ``None`` if the store does not record one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetFile:
    """One file of a version."""

    path: str
    size: int
    sha256: str
    number: int
    """The version whose data directory contains it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetManifest:
    """The list of a version's files."""

    name: str
    number: int
    created: float
    """Seconds since the epoch, by the clock of its writer."""
    files: tuple[DatasetFile, ...]

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(one.size for one in self.files)

    def matching(self, regex: str) -> tuple[DatasetFile, ...]:
        """Return the files whose paths ``regex`` matches from their start; all files for an empty regex."""
        pattern = compile_regex(regex)
        return tuple(one for one in self.files if pattern is None or pattern.match(one.path))


class _DamagedManifest(StorageError):
    """The manifest of a version cannot be read."""


class Datasets:
    """The datasets below one URL."""

    def __init__(self, store: DataStore, base: StorageUrl, retries: Retries | None = None) -> None:
        """Use the store of ``base``; this sends no request."""
        self._store = store
        self._base = base
        self._retries = retries or Retries()

    def versions(self, name: str = "") -> tuple[Version, ...]:
        """Return the versions of one dataset, or of all datasets, ordered by name and number."""
        found = []
        for path, at in self._names(f"{_VERSIONS}/{name}" if name else _VERSIONS):
            match = re.fullmatch(r"([A-Za-z0-9_-]+)/([1-9][0-9]{0,17})\.json", f"{name}/{path}" if name else path)
            if match is not None:
                found.append(Version(name=match.group(1), number=int(match.group(2)), at=at))
        return tuple(sorted(found, key=lambda one: (one.name, one.number)))

    def manifest(self, name: str, number: int | None = None) -> DatasetManifest:
        """Return the manifest of a version, by default of the latest one. Raises ``NotFound`` and ``StorageError``."""
        existing = [one.number for one in self.versions(name)]
        if not existing:
            raise NotFound(
                f"there is no dataset `{name}` in {self._base}", hint="`distflow dataset list` shows the existing datasets"
            )
        if number is None:
            number = existing[-1]
        if number not in existing:
            known = ", ".join(str(one) for one in existing[-10:])
            raise NotFound(f"the dataset `{name}` has no version {number}", hint=f"its latest versions: {known}")
        return self._load(name, number)

    def add(
        self, name: str, files: Sequence[UploadSource], *, upload_id: str, at: float, on_progress: Progress = ignore_progress
    ) -> DatasetManifest:
        """Write a new version and return its manifest.

        A repeated call with the same ``upload_id`` continues the same upload, and does nothing if that is complete. Raises
        ``StorageError`` and ``TransferCanceled``.
        """
        parse_dataset(name)
        number = self._claim(name, upload_id)
        if any(one.number == number for one in self.versions(name)):
            return self.manifest(name, number)
        listed = self._send(name, number, files, on_progress)
        manifest = DatasetManifest(name=name, number=number, created=at, files=listed)
        self._put(manifest)
        return manifest

    def update(
        self, name: str, files: Sequence[UploadSource], *, upload_id: str, at: float, on_progress: Progress = ignore_progress
    ) -> DatasetManifest:
        """Write a new version with the files of an existing one, replaced or extended by ``files``.

        ``name`` is ``mnist:3`` for version 3 of the dataset ``mnist``, or ``mnist`` for the latest one. The latest one is
        determined after the upload, so files that other uploads add at the same time are kept. The files of the existing
        version, and files that equal them, are not uploaded again. ``upload_id`` is as in ``add``. Raises ``StorageError``,
        ``TransferCanceled``, and ``NotFound`` for a missing version.
        """
        plain, wanted = parse_dataset(name)
        base = self.manifest(plain, wanted)  # fails before anything is uploaded
        number = self._claim(plain, upload_id)
        if any(one.number == number for one in self.versions(plain)):
            return self.manifest(plain, number)
        listed = self._send(plain, number, files, on_progress, base.files)
        with self._turn(plain, upload_id):
            old = self.manifest(plain, wanted)
            latest = self.versions(plain)[-1].number
            if latest > number:
                number = self._claim(plain, upload_id, above=latest)
            whole = tuple(sorted((*_not_replaced(old.files, listed), *listed), key=lambda one: one.path))
            manifest = DatasetManifest(name=plain, number=number, created=at, files=whole)
            self._put(manifest)
            missing = {base.number, old.number}.difference(one.number for one in self.versions(plain))
            if missing:
                # The process that removed it may also have removed files that the new version shares.
                self.remove(plain, number)
                message = f"version {min(missing)} of the dataset `{plain}` was removed during the update"
                raise StorageError(message, hint="update another version")
        return manifest

    def _send(
        self, name: str, number: int, files: Sequence[UploadSource], on_progress: Progress, existing: Sequence[DatasetFile] = ()
    ) -> tuple[DatasetFile, ...]:
        """Upload the files that are not equal to an existing one, and return all files."""
        stored = {(one.path, one.size, one.sha256): one.number for one in existing}
        before = []
        for one in files:
            with local_errors(one.path):
                before.append((one.path.stat().st_mtime_ns, sha256(one.path)))
        listed = [
            DatasetFile(path=one.name, size=one.size, sha256=sha, number=stored.get((one.name, one.size, sha), number))
            for one, (_, sha) in zip(files, before, strict=True)
        ]
        new = [source for source, one in zip(files, listed, strict=True) if one.number == number]
        upload(self._store, self._data(name, number), new, retries=self._retries, on_progress=on_progress)
        for one, (changed, _) in zip(files, before, strict=True):
            with local_errors(one.path):
                if one.path.stat().st_mtime_ns != changed:
                    raise StorageError(f"{one.path} was changed during its upload", hint="upload it again")
        return tuple(sorted(listed, key=lambda one: one.path))

    def fetch(
        self,
        manifest: DatasetManifest,
        target: Path,
        *,
        regex: str = "",
        resume: bool = False,
        on_progress: Progress = ignore_progress,
    ) -> TransferResult:
        """Download to ``target`` the files of a version whose paths match ``regex``. Their SHA-256 is checked.

        Raises ``StorageError`` and ``TransferCanceled``.
        """
        wanted = {one.path: one for one in manifest.matching(regex)}
        if not wanted:
            return TransferResult()
        result, whole = TransferResult(), sum(one.size for one in wanted.values())
        for number in sorted({one.number for one in wanted.values()}):
            part = download(
                self._store, self._data(manifest.name, number), target,
                checksums={one.path: one.sha256 for one in wanted.values() if one.number == number}, resume=resume,
                retries=self._retries,
                on_progress=lambda done, _, before=result.size: on_progress(before + done, whole),  # type: ignore[misc]
            )  # fmt: skip
            result = TransferResult(
                files=result.files + part.files, size=result.size + part.size,
                skipped=result.skipped + part.skipped, skipped_size=result.skipped_size + part.skipped_size,
            )  # fmt: skip
        return result

    def remove(self, name: str, number: int) -> None:
        """Remove a version: first its manifest, then its files that no other version shares. Its number is not used again.

        A version with a damaged manifest can be removed; its files that are stored with earlier versions then remain. Raises
        ``StorageError``. If the manifest of another version is damaged, the error is raised before anything is removed.
        """
        parse_dataset(name)
        files: Sequence[DatasetFile] = ()
        if any(one.number == number for one in self.versions(name)):
            with suppress(_DamagedManifest):
                files = self._load(name, number).files
        self._files_of_others(name, number)  # raises before anything is removed
        self._retries.call(lambda: self._store.delete(self._manifest(name, number).key))
        shared = self._files_of_others(name, number)  # again: a version may have been added before the manifest was removed
        for at in sorted({number, *(one.number for one in files)}):
            data = self._data(name, at)
            found = select(data, self._retries.call(lambda data=data: self._store.find_removable(data.key)))  # type: ignore[misc]
            own = {one.path for one in files if one.number == at}
            unused = [one for one in found if (at, one.name) not in shared and (at == number or one.name in own)]
            delete(self._store, data, unused, retries=self._retries)

    def _files_of_others(self, name: str, number: int) -> set[tuple[int, str]]:
        """Return the files of all other versions of the dataset: the version with which each is stored, and its path."""
        others = (one.number for one in self.versions(name) if one.number != number)
        return {(file.number, file.path) for other in others for file in self._load(name, other).files}

    def _data(self, name: str, number: int) -> StorageUrl:
        return self._base.below(f"{_DATA}/{name}/{number}")

    def _manifest(self, name: str, number: int) -> StorageUrl:
        return self._base.below(f"{_VERSIONS}/{name}/{number}.json")

    def _load(self, name: str, number: int) -> DatasetManifest:
        url = self._manifest(name, number)
        try:
            return _manifest_of(decode_object(self._read(url), max_bytes=_MANIFEST_BYTES), name, number)
        except (ValueError, KeyError, TypeError) as error:
            why = f"{error} is missing" if isinstance(error, KeyError) else error
            raise _DamagedManifest(
                f"{url} is not a manifest of a dataset: {why}",
                hint=f"remove this version: distflow dataset delete {name}:{number}",
            ) from error

    def _put(self, manifest: DatasetManifest) -> None:
        self._write(self._manifest(manifest.name, manifest.number), _text(manifest))

    @contextmanager
    def _turn(self, name: str, upload_id: str) -> Iterator[None]:
        """Wait until no other update of the dataset has its turn, and run the block as the turn of this update."""
        mine = self._base.below(f"{_TURNS}/{name}/{upload_id}")
        try:
            while True:
                self._write(mine, "")
                since = dict(self._names(f"{_TURNS}/{name}"))
                now = since.pop(upload_id, None)
                if not any(_is_alive(other, now) for other in since.values()):
                    break
                self._retries.call(lambda: self._store.delete(mine.key))
                self._retries.check()
                self._retries.canceled.wait(random.uniform(0.0, _MOST_PAUSE_S))  # noqa: S311  so that two writers do not collide again
            yield
        finally:
            with suppress(StorageError):  # an abandoned turn expires
                self._store.delete(mine.key)

    def _claim(self, name: str, upload_id: str, above: int = 0) -> int:
        """Return the version number above ``above`` that is reserved for the upload; reserve one if there is none yet."""
        for _ in range(_ROUNDS):
            self._retries.check()
            taken: dict[int, set[str]] = {}
            for path, _at in self._names(f"{_CLAIMS}/{name}"):
                number, _, who = path.partition(".")
                if re.fullmatch("[0-9]{1,18}", number):
                    taken.setdefault(int(number), set()).add(who)
            mine = [number for number, marks in taken.items() if upload_id in marks]
            if mine and taken[max(mine)] == {upload_id} and max(mine) > above:
                return max(mine)
            if mine and max(mine) > above:
                claim = self._base.below(f"{_CLAIMS}/{name}/{max(mine)}.{upload_id}")
                self._retries.call(lambda claim=claim: self._store.delete(claim.key))  # type: ignore[misc]
                self._retries.canceled.wait(random.uniform(0.0, _MOST_PAUSE_S))  # noqa: S311  so that two writers do not collide again
                continue
            existing = [one.number for one in self.versions(name)]
            self._write(self._base.below(f"{_CLAIMS}/{name}/{max([above, *existing, *taken]) + 1}.{upload_id}"), "")
        message = f"{self._base}: could not reserve a version number of `{name}`: too many concurrent uploads"
        raise StorageUnreachable(message, hint="try again when other uploads to this dataset have ended")

    def _names(self, below: str) -> list[tuple[str, float | None]]:
        url = self._base.below(below)
        found = self._retries.call(lambda: self._store.find(url.key))
        return [(one.name, one.entry.modified) for one in select(url, found)]

    def _read(self, url: StorageUrl) -> bytes:
        def read() -> bytes:
            content = bytearray()

            def keep(piece: bytes) -> None:
                content.extend(piece)
                if len(content) > _MANIFEST_BYTES:
                    limit = f"{_MANIFEST_BYTES >> 20} MiB"
                    message = f"{url} is too large for a manifest (limit: {limit})"
                    raise StorageError(message, hint="upload a new version with fewer files, such as archives of the files")

            self._store.read(self._store.stat(url.key), 0, keep)
            return bytes(content)

        return self._retries.call(read)

    def _write(self, url: StorageUrl, text: str) -> None:
        with tempfile.NamedTemporaryFile(prefix="distflow-", suffix=".json") as file:
            file.write(text.encode())
            file.flush()
            self._retries.call(lambda: self._store.write(url.key, Path(file.name), lambda _: None))


def _manifest_of(body: Mapping[str, Any], name: str, number: int) -> DatasetManifest:
    """Return a manifest with checked values, because other users of the store may have written it."""
    created = body["created"]
    if type(created) not in (int, float) or not 0 <= created <= _LATEST_S:
        raise ValueError("`created` is not a time")
    files = tuple(_file_of(one, number) for one in body["files"])
    names = {one.path for one in files}
    if len(names) != len(files):
        raise ValueError("it lists a path twice")
    for one in files:
        why = why_not_a_file(one.path, names)
        if why:
            raise ValueError(f"it lists the file `{plain(one.path[:_SHOWN])}`, but {why}")
    return DatasetManifest(name=name, number=number, created=float(created), files=files)


def _file_of(one: Mapping[str, Any], number: int) -> DatasetFile:
    path, size, digest, at = one["path"], one["size"], one["sha256"], one.get("version", number)
    if not isinstance(path, str):
        raise ValueError("the path of a file is not a string")  # noqa: TRY004  callers expect one class
    if not isinstance(digest, str) or not re.fullmatch("[0-9a-f]{64}", digest):
        raise ValueError(f"the SHA-256 of `{plain(path[:_SHOWN])}` is not valid")
    if type(size) is not int or size < 0 or type(at) is not int or at < 1:
        raise ValueError(f"the size or the version of `{plain(path[:_SHOWN])}` is not valid")
    return DatasetFile(path=path, size=size, sha256=digest, number=at)


def _text(manifest: DatasetManifest) -> str:
    body = {
        "name": manifest.name, "version": manifest.number, "created": manifest.created, "bytes": manifest.size,
        "files": [
            {"path": one.path, "size": one.size, "sha256": one.sha256}
            | ({"version": one.number} if one.number != manifest.number else {})
            for one in manifest.files
        ],
    }  # fmt: skip
    return json.dumps(body, indent=1) + "\n"


def _not_replaced(old: Sequence[DatasetFile], new: Sequence[DatasetFile]) -> list[DatasetFile]:
    """Return the old files that no new file replaces.

    A new file replaces an old file with the same path, an old file whose path is one of its parent directories, and all files
    below its path.
    """
    names = {one.path for one in new}
    folders = {folder for one in new for folder in _folders(one.path)}
    return [
        one for one in old if one.path not in names and one.path not in folders and names.isdisjoint(_folders(one.path))
    ]  # fmt: skip


def _folders(path: str) -> list[str]:
    parts = path.split("/")
    return ["/".join(parts[:end]) for end in range(1, len(parts))]


def _is_alive(since: float | None, now: float | None) -> bool:
    """Return whether a turn that began at ``since`` may still be held. Both times are from the store's clock."""
    return since is None or now is None or now - since < _LONGEST_TURN_S
