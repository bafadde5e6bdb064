"""Unpacking an archive below a directory, never outside it; owners, devices and special bits are not taken over."""

from __future__ import annotations

import os
import re
import shutil
import tarfile
from typing import BinaryIO, Optional, Pattern, Set

from distflow.runtime.inside import inside
from distflow.runtime.wire import OpError

__all__ = ["unpack"]

_SMALL = 1 << 20


def unpack(archive: BinaryIO, top: str, only: str = "") -> None:
    """Unpack files, directories and links that stay inside ``top``. May be done again over what is there.

    ``only`` is a regular expression: of the files and links those whose relative path it matches from its start, in the
    directories that they need.
    """
    wanted = _matcher(only)
    real_top = os.path.realpath(top)
    known: Set[str] = set()
    with tarfile.open(fileobj=archive, mode="r:*") as tar:
        for member in tar:
            name = os.path.normpath(member.name)
            if name == "." or (wanted is not None and (member.isdir() or not wanted.match(name))):
                continue
            path = _place_of(top, name, known)
            if member.isdir():
                if os.path.islink(path):
                    os.unlink(path)
                os.makedirs(path, exist_ok=True)
                os.chmod(path, (member.mode & 0o777) | 0o700)
            elif member.isfile():
                _unpack_file(tar, member, path)
            elif member.issym():
                known.clear()
                _clear(path)
                os.symlink(member.linkname, path)
                _refuse_outside(path, real_top, member)
            elif member.islnk():
                source = inside(top, os.path.normpath(member.linkname))
                _clear(path)
                os.link(source, path, follow_symlinks=False)
                _refuse_outside(path, real_top, member)
            else:
                raise OpError("bad_request", "the archive holds {!r}, which is no file, directory or link".format(member.name))


def _matcher(only: str) -> Optional[Pattern[str]]:
    try:
        return re.compile(only) if only else None
    except re.error as error:
        raise OpError("bad_request", "{!r} is no regular expression here: {}".format(only, error)) from error


def _place_of(top: str, name: str, known: Set[str]) -> str:
    """Where a member goes, its directory made."""
    seen = len(known)
    path = inside(top, name, known)
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
        os.utime(fd, (member.mtime, member.mtime))


def _refuse_outside(path: str, real_top: str, member: tarfile.TarInfo) -> None:
    real = os.path.realpath(path)
    if real != real_top and not real.startswith(real_top + os.sep):
        os.unlink(path)
        raise OpError("bad_request", "the archive's link {!r} leads outside ({!r})".format(member.name, member.linkname))
