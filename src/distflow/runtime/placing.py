"""Placing an attempt's files: text, blobs and archives, never outside its directory."""

from __future__ import annotations

import json
import os
import shutil
import tarfile
from typing import IO, Optional, Set

from distflow.runtime.blobs import BLOBS
from distflow.runtime.wire import Json, OpError

__all__ = ["LAUNCH", "place", "write_launch"]

LAUNCH = "launch.json"
_RECORDS = {"launch.json", "runner.json", "exit.json", ".exit.json", "error.json"}
_OURS = _RECORDS | {"control", "output.log", "output.idx", "pair.log"}


def place(root: str, directory: str, launch: Json) -> None:
    """Place every file of ``launch`` (placeholders filled) and write ``launch.json``. May be done again after a break."""
    for file in launch.get("files") or []:
        _place(root, directory, file)
    os.makedirs(_inside(directory, launch.get("cwd") or "work"), exist_ok=True)
    write_launch(directory, launch)


def write_launch(directory: str, launch: Json) -> None:
    """Write ``launch.json`` without the secrets."""
    path = os.path.join(directory, LAUNCH)
    public = {key: value for key, value in launch.items() if key != "secret_env"}
    public["secret_env_names"] = sorted(launch.get("secret_env") or {})
    fd = os.open(path + ".new", os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    with os.fdopen(fd, "w", encoding="utf-8") as file:
        json.dump(public, file, indent=1)
    os.rename(path + ".new", path)


def _inside(top: str, relative: str, known: Optional[Set[str]] = None) -> str:
    """The path of ``relative`` below ``top``. Raises when it leads outside, by itself or through a link.

    ``known`` remembers directories that were found to be inside; whoever makes a link forgets them.
    """
    if not relative or os.path.isabs(relative) or ".." in relative.split("/") or "\0" in relative:
        raise OpError("bad_request", "the path {!r} does not lie below the attempt's directory".format(relative))
    path = os.path.normpath(os.path.join(top, relative))
    if known is not None and os.path.dirname(path) in known:
        return path
    real_top = os.path.realpath(top)
    parent = os.path.realpath(os.path.dirname(path)) if path != os.path.normpath(top) else real_top
    if parent != real_top and not parent.startswith(real_top + os.sep):
        raise OpError("bad_request", "the path {!r} leads through a link out of the attempt's directory".format(relative))
    if known is not None:
        known.add(os.path.dirname(path))
    return path


def _place(root: str, directory: str, file: Json) -> None:
    relative = str(file["path"])
    if os.path.normpath(relative).split("/")[0] in _OURS:
        raise OpError("bad_request", "{!r} is a file of distflow's own".format(relative))
    path = _inside(directory, relative)
    try:
        if file.get("is_tar"):
            os.makedirs(path, exist_ok=True)
            with open(_blob(root, file), "rb") as archive:
                _unpack(archive, path)
            return
        os.makedirs(os.path.dirname(path), exist_ok=True)
        new = path + ".new"
        fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        with os.fdopen(fd, "wb") as target:
            if file.get("text") is not None:
                target.write(str(file["text"]).encode("utf-8", "surrogateescape"))
            else:
                with open(_blob(root, file), "rb") as source:
                    shutil.copyfileobj(source, target, 1024 * 1024)
            os.fchmod(target.fileno(), int(file.get("mode") or 0o600) & 0o777)
        os.rename(new, path)
    except OSError as error:
        raise OpError.from_os(error, "the file {} cannot be placed".format(relative)) from error


def _blob(root: str, file: Json) -> str:
    name = str(file.get("blob"))
    path = os.path.join(root, BLOBS, os.path.basename(name))
    if not os.path.isfile(path):
        raise OpError("not_found", "the blob {} of {} was not staged".format(name, file["path"]))
    return path


def _unpack(archive: IO[bytes], top: str) -> None:
    """Unpack files, directories and links that stay inside ``top``; owners, devices and special bits are not taken over."""
    real_top = os.path.realpath(top)
    known: Set[str] = set()
    with tarfile.open(fileobj=archive, mode="r:*") as tar:
        for member in tar:
            name = os.path.normpath(member.name)
            if name == ".":
                continue
            path = _inside(top, name, known)
            if member.isdir():
                if os.path.islink(path):
                    os.unlink(path)
                os.makedirs(path, exist_ok=True)
                os.chmod(path, (member.mode & 0o777) | 0o700)
                continue
            os.makedirs(os.path.dirname(path), exist_ok=True)
            if os.path.islink(path) or os.path.isfile(path):
                os.unlink(path)
            if member.isfile():
                _unpack_file(tar, member, path)
            elif member.issym():
                known.clear()
                os.symlink(member.linkname, path)
                _refuse_outside(path, real_top, member)
            elif member.islnk():
                source = _inside(top, os.path.normpath(member.linkname))
                os.link(source, path, follow_symlinks=False)
                _refuse_outside(path, real_top, member)
            else:
                raise OpError("bad_request", "the archive holds {!r}, which is no file, directory or link".format(member.name))


def _unpack_file(tar: tarfile.TarFile, member: tarfile.TarInfo, path: str) -> None:
    source = tar.extractfile(member)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    with os.fdopen(fd, "wb") as target:
        if source is not None:
            shutil.copyfileobj(source, target, 1024 * 1024)
        os.fchmod(target.fileno(), (member.mode & 0o777) | 0o600)
    os.utime(path, (member.mtime, member.mtime))


def _refuse_outside(path: str, real_top: str, member: tarfile.TarInfo) -> None:
    real = os.path.realpath(path)
    if real != real_top and not real.startswith(real_top + os.sep):
        os.unlink(path)
        raise OpError("bad_request", "the archive's link {!r} leads outside ({!r})".format(member.name, member.linkname))
