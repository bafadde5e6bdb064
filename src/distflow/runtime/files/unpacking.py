"""Unpacking an archive below a directory, never outside it. Devices are refused, and owners and special mode bits ignored."""

from __future__ import annotations

import os
import re
import shutil
import tarfile

from distflow.protocol.light_typing import BinaryIO, Container, List, Optional, Pattern, Set
from distflow.runtime.files.safe_files import path_inside
from distflow.runtime.wire import OpError

__all__ = ["EARLIEST_S", "file_time", "unpack"]

EARLIEST_S = 315619200
"""January 2, 1980: ``zip`` rejects times before 1980 in the local time zone."""
_LATEST_S = 2**32
_SMALL = 1 << 20
_HEADER_BYTES = 1 << 20
"""Limit of extended headers, which tarfile reads into memory whatever their size."""
_EXTENDED = (
    tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK, tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE,
)  # fmt: skip


def unpack(
    archive: BinaryIO, top: str, only: str = "", *, within: str = "", compressed: bool = True, present: Container[str] = ()
) -> Optional[List[str]]:
    """Unpack files, directories and links below ``top``. Can be repeated over existing files.

    A path or a link that leads outside of ``top`` is an error. ``only`` is a regular expression: only files and links whose
    relative path it matches from the start are unpacked, with their directories. ``within`` names one directory of ``top``:
    only its contents are unpacked, and nothing outside of it is written. ``compressed``: whether the archive may be compressed.
    ``present``: names that are not unpacked.

    Returns the names of the unpacked files and directories, or ``None`` if a link was unpacked or replaced. Raises only
    ``OpError`` and ``OSError``.
    """
    wanted = _matcher(only)
    try:
        with tarfile.open(fileobj=archive, mode="r:*" if compressed else "r:", tarinfo=_Member) as tar:
            names: List[str] = []
            has_links = _unpack_members(tar, top, wanted, within, present, names)
    except (OpError, OSError):
        raise
    except Exception as error:  # tarfile raises many kinds of errors for a damaged archive, such as RecursionError
        raise OpError("bad_request", "the archive is damaged: {}".format(str(error) or type(error).__name__)) from error
    if has_links:
        _refuse_links_outside(top)
        return None
    return names


def file_time(modified_at: float) -> float:
    """Return the time to set for a file whose archive or store reports ``modified_at``: limited to the years 1980 to 2106."""
    # Not `max`, because an extended header can contain NaN.
    return min(modified_at, _LATEST_S) if modified_at >= EARLIEST_S else EARLIEST_S


class _Member(tarfile.TarInfo):
    def _proc_member(self, tar: tarfile.TarFile) -> tarfile.TarInfo:
        if self.type in _EXTENDED and self.size > _HEADER_BYTES:
            raise OpError("bad_request", "the archive has a header of {} bytes, which is too large".format(self.size))
        member: tarfile.TarInfo = super()._proc_member(tar)  # type: ignore[misc]
        return member


def _unpack_members(
    tar: tarfile.TarFile, top: str, wanted: Optional[Pattern[str]], within: str, present: Container[str], names: List[str]
) -> bool:
    """Unpack the wanted members, append their names to ``names``, and return whether links were made or replaced."""
    known: Set[str] = set()
    has_links = False
    for member in tar:
        name = os.path.normpath(member.name)
        if name == "." or name in present or (wanted is not None and (member.isdir() or not wanted.match(name))):
            continue
        if within:
            first, _, rest = name.partition("/")
            if first != within or not rest:
                continue
            path = _prepared_path(os.path.join(top, within), rest, known)
        else:
            path = _prepared_path(top, name, known)
        names.append(name)
        if member.issym() or member.islnk() or os.path.islink(path):
            # Directories that were checked before may be links after this.
            known.clear()
            has_links = True
        if member.isdir():
            if os.path.islink(path):
                os.unlink(path)
            os.makedirs(path, exist_ok=True)
            os.chmod(path, (member.mode & 0o777) | 0o700)
        elif member.isfile() and not member.issparse():
            _unpack_file(tar, member, path)
        elif member.issym():
            _clear(path)
            os.symlink(member.linkname, path)
            _refuse_outside(top, path)
        elif member.islnk():
            source = path_inside(top, os.path.normpath(member.linkname))
            _clear(path)
            os.link(source, path, follow_symlinks=False)
            _refuse_outside(top, path)
        else:
            text = "the archive contains {!r}, which is not an ordinary file, directory or link; pack the archive without it"
            raise OpError("bad_request", text.format(member.name))
    return has_links


def _matcher(only: str) -> Optional[Pattern[str]]:
    try:
        return re.compile(only) if only else None
    except re.error as error:
        raise OpError("bad_request", "{!r} is not a regular expression that Python accepts: {}".format(only, error)) from error


def _prepared_path(top: str, name: str, known: Set[str]) -> str:
    """Return a member's path, and create its directory."""
    seen = len(known)
    path = path_inside(top, name, known)
    if len(known) > seen:
        os.makedirs(os.path.dirname(path), exist_ok=True)
    return path


def _clear(path: str) -> None:
    if os.path.islink(path) or os.path.isfile(path):
        os.unlink(path)


def _unpack_file(tar: tarfile.TarFile, member: tarfile.TarInfo, path: str) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        fd = os.open(path, flags, 0o600)
    except FileExistsError:
        _clear(path)
        fd = os.open(path, flags, 0o600)
    source = tar.extractfile(member)
    with os.fdopen(fd, "wb") as target:
        if source is not None and member.size <= _SMALL:
            target.write(source.read())
        elif source is not None:
            shutil.copyfileobj(source, target, _SMALL)
        target.flush()
        os.fchmod(fd, (member.mode & 0o777) | 0o600)
        os.utime(fd, (file_time(member.mtime),) * 2)


def _refuse_links_outside(top: str) -> None:
    """Check all links again: later members may have changed their targets."""
    for folder, folders, names in os.walk(top):
        for name in folders + names:
            path = os.path.join(folder, name)
            if os.path.islink(path):
                _refuse_outside(top, path)


def _refuse_outside(top: str, path: str) -> None:
    real, real_top = os.path.realpath(path), os.path.realpath(top)
    if real != real_top and not real.startswith(real_top + os.sep):
        target = os.readlink(path) if os.path.islink(path) else real
        os.unlink(path)
        text = "the archive's link {!r} points outside of the directory into which it is unpacked, to {!r}; remove the link"
        raise OpError("bad_request", text.format(os.path.relpath(path, top), target))
