"""Packing a task's files into a blob: a tar that depends only on names, contents, times and execute bits, named by its SHA-256.

The blob is stored like all other blobs, so it need not be sent to the node that packed it. ``packed.json`` records the
packed output of an ended attempt, which is not packed again. A checkpoint is packed while its task runs. Files that change
meanwhile are left out, so that no file is inconsistent.
"""

from __future__ import annotations

import hashlib
import json
import os
import select
import stat
import tarfile
import tempfile

from distflow.protocol.light_typing import Callable, Iterator, List, Optional, Set, Tuple
from distflow.runtime.clock import file_system_now
from distflow.runtime.files import attempts
from distflow.runtime.files.blobs import BLOBS, Part, is_complete, path_of
from distflow.runtime.files.safe_files import path_inside
from distflow.runtime.hashing import sha256_hex
from distflow.runtime.untrusted import MAX_BYTES, decode_object
from distflow.runtime.wire import Json, OpError

__all__ = ["check_output", "link_target", "output_of", "pack_output", "pack_place", "walk"]

_PACKED = "packed.json"
_CHUNK = 1 << 20
_MAX_NAMED = 3
"""Number of left-out files that are named; further files are counted."""
_SETTLED_S = 0.05
"""A file counts as changing if it was written during a pass, or in this time before it.

File times are only as fine as a clock tick.
"""
_PAUSE_S = 2 * _SETTLED_S
"""Pause between two passes: files that stop changing during the first pass are settled before the second."""
_PASSES = 6
"""Number of times that a changing directory is packed before giving up."""

OnProgress = Callable[[int, int], None]


def pack_output(root: str, attempt: str, on_progress: OnProgress) -> Json:
    """Pack an attempt's output.

    Returns ``hash`` and ``size`` of the blob, ``files`` (the number of entries), and ``left_out`` (names of sockets, pipes and
    devices; after three names, the number of others). ``on_progress`` gets the packed and the total bytes.

    Raises ``not_found`` if the output is gone, and ``OpError`` for a file that cannot be read, or a link to something
    outside of the output that is not a file.
    """
    directory = attempts.directory_of(root, attempt)
    known = _packed_before(root, directory)
    if known is not None:
        return known
    output = output_of(directory)
    entries = list(walk(output, ""))
    left_out = sorted(name for name, info in entries if not _is_packable(info))
    packed = _pack(root, attempt, output, [(name, info) for name, info in entries if _is_packable(info)], left_out, on_progress)
    _record_packed(directory, packed)
    return packed


def check_output(root: str, attempt: str) -> str:
    """Return the directory of an attempt's output. Raises ``OpError`` like ``pack_output``, but not for unreadable files."""
    output = output_of(attempts.directory_of(root, attempt))
    for name, info in walk(output, ""):
        if stat.S_ISLNK(info.st_mode):
            link_target(output, name)
    return output


def pack_place(root: str, attempt: str, place: str, on_progress: OnProgress) -> Json:
    """Pack a directory of an attempt that may still run. Returns the same keys as ``pack_output``.

    ``place`` is the path of the directory below the attempt's directory, and its last part begins all names in the archive. If
    there is no file to pack, ``files`` is 0, ``hash`` and ``left_out`` are empty, and there is no blob. ``left_out`` also names
    files that change meanwhile, and links to something outside of the parent directory that is not a file.

    Raises ``not_found`` if the attempt's directory is gone, ``busy`` if all files of the directory keep changing or
    different files change in each pass, and another ``OpError`` for a file that cannot be read.
    """
    directory = attempts.directory_of(root, attempt)
    path = path_inside(directory, place)
    top, base = os.path.split(path)
    if not os.path.isdir(directory):
        raise OpError("not_found", "`{}` no longer exists".format(directory))
    unstable: Set[str] = set()
    for number in range(_PASSES):
        if number:
            select.select([], [], [], _PAUSE_S)  # inotify does not report all writes, such as those to mapped memory
        began = file_system_now(root)
        entries = _below(top, base)
        unpackable = {name for name, info in entries if not _is_packable(info) or _leads_out(top, name, info)}
        members = [(name, info) for name, info in entries if name not in unpackable and name not in unstable]
        if not any(stat.S_ISREG(info.st_mode) for _, info in members):
            if number == 0 or not unstable:
                return {"hash": "", "size": 0, "files": 0, "left_out": []}
            break
        left_out = sorted(unstable | unpackable)
        packed, failure = None, None
        try:
            packed = _pack(root, attempt + "/" + place, top, members, left_out, on_progress)
        except OpError as error:
            failure = error  # a file may have been removed or truncated while it was read
        after = {name: _fingerprint(info) for name, info in _below(top, base)}
        files = [(name, info) for name, info in members if not stat.S_ISDIR(info.st_mode)]
        fresh = (began - _SETTLED_S, file_system_now(root) + _SETTLED_S)
        changed = {name for name, info in files if after.get(name) != _fingerprint(info) or fresh[0] < info.st_mtime < fresh[1]}
        if not changed:
            if packed is None:
                raise failure or OpError("internal", "nothing was packed")
            return packed
        if packed is not None:
            os.unlink(path_of(root, packed["hash"]))
        if number:  # a file that changed only during the first pass may be complete now
            unstable |= changed
    raise OpError("busy", "the files of `{}` change all the time, so that no consistent copy can be made".format(path))


def output_of(directory: str) -> str:
    """Return the path of the output in an attempt's directory. Raises ``not_found`` if it is gone or is now a link."""
    output = os.path.join(directory, "output")
    if not os.path.isdir(output) or os.path.islink(output):
        raise OpError("not_found", "`{}` no longer exists, or the task replaced it".format(output))
    return output


def link_target(output: str, name: str) -> Tuple[str, bool]:
    """Return a link's target, and whether it is in the output. Raises ``bad_request`` if it is outside and not a file."""
    path = os.path.join(output, name)
    top, target = os.path.realpath(output), os.path.realpath(path)
    if target == top or target.startswith(top + os.sep):
        return target, True
    if not os.path.isfile(target):
        if os.path.isdir(target):
            why = "a directory outside of the output; copy the directory, or remove the link"
        else:
            why = "which is outside of the output and is not a file; copy a file there, or remove the link"
        text = "the link `{}` in the task's output points to `{}`, " + why
        raise OpError("bad_request", text.format(name, os.readlink(path)))
    return target, False


def _leads_out(top: str, name: str, info: os.stat_result) -> bool:
    """Return whether an entry is a link out of ``top`` that does not lead to a file."""
    if not stat.S_ISLNK(info.st_mode):
        return False
    try:
        link_target(top, name)
    except OpError:
        return True
    return False


def _below(top: str, base: str) -> List[Tuple[str, os.stat_result]]:
    """Return the directory ``base`` of ``top`` and everything below it; nothing if there is no such directory."""
    try:
        info = os.lstat(os.path.join(top, base))
    except FileNotFoundError:
        return []
    return [(base, info), *walk(top, base)] if stat.S_ISDIR(info.st_mode) else []


def _fingerprint(info: os.stat_result) -> Tuple[int, int, int]:
    return info.st_size, info.st_mtime_ns, info.st_ino


def _pack(
    root: str, named: str, top: str, members: List[Tuple[str, os.stat_result]], left_out: List[str], on_progress: OnProgress
) -> Json:
    part = Part(os.path.join(root, BLOBS, "pack-" + sha256_hex(named.encode())[:16]))
    try:
        os.ftruncate(part.fd, 0)
        sink = _Sink(part.fd, sum(info.st_size for _, info in members if stat.S_ISREG(info.st_mode)), on_progress)
        with tarfile.open(fileobj=sink, mode="w|", format=tarfile.PAX_FORMAT, bufsize=_CHUNK) as tar:  # type: ignore[call-overload]
            for name, info in members:
                _add(tar, top, name, info)
    except BaseException:
        part.drop()
        raise
    digest = sink.digest.hexdigest()
    part.finish(path_of(root, digest))
    return {"hash": digest, "size": sink.size, "files": len(members), "left_out": _shortened(left_out)}


def _packed_before(root: str, directory: str) -> Optional[Json]:
    try:
        with open(os.path.join(directory, _PACKED), "rb") as file:
            packed = decode_object(file.read(MAX_BYTES + 1))
        path = path_of(root, packed["hash"])
        if not is_complete(path) or packed["size"] != os.stat(path).st_size:
            return None  # tasks can write this file, so it is not trusted
        left_out = [str(name) for name in packed["left_out"]]
        return {"hash": packed["hash"], "size": packed["size"], "files": int(packed["files"]), "left_out": left_out}
    except (OSError, OpError, ValueError, KeyError, TypeError):
        return None


def _record_packed(directory: str, packed: Json) -> None:
    # The temporary file has a unique name, because a sender whose connection broke may still be writing the same record.
    fd, new = tempfile.mkstemp(prefix=_PACKED + ".", dir=directory)
    with os.fdopen(fd, "w", encoding="utf-8") as file:
        json.dump(packed, file)
    os.rename(new, os.path.join(directory, _PACKED))


def walk(top: str, below: str) -> Iterator[Tuple[str, os.stat_result]]:
    """Yield everything in the folder ``below`` of ``top``, with its path relative to ``top``.

    Directories come before their contents. The entries of a directory are sorted by the bytes of their names.

    Entries that disappear meanwhile, such as files that are written and then renamed, are left out.
    """
    try:
        entries = sorted(os.scandir(os.path.join(top, below)), key=lambda entry: os.fsencode(entry.name))
    except (FileNotFoundError, NotADirectoryError):
        return
    except OSError as error:
        raise OpError.from_os(error, "cannot read the task's files") from error
    for entry in entries:
        name = os.path.join(below, entry.name)
        try:
            info = entry.stat(follow_symlinks=False)
        except FileNotFoundError:
            continue
        yield name, info
        if stat.S_ISDIR(info.st_mode):
            yield from walk(top, name)


def _is_packable(info: os.stat_result) -> bool:
    """Return whether an entry can be packed: sockets, pipes and devices have no content to transfer."""
    return stat.S_ISDIR(info.st_mode) or stat.S_ISREG(info.st_mode) or stat.S_ISLNK(info.st_mode)


def _add(tar: tarfile.TarFile, output: str, name: str, info: os.stat_result) -> None:
    path = os.path.join(output, name)
    member = tarfile.TarInfo(name)
    member.mode = 0o700 if stat.S_ISDIR(info.st_mode) or info.st_mode & 0o100 else 0o600
    if stat.S_ISDIR(info.st_mode):
        member.type = tarfile.DIRTYPE
        tar.addfile(member)
        return
    if stat.S_ISLNK(info.st_mode):
        target, is_inside = link_target(output, name)
        if is_inside:
            member.type = tarfile.SYMTYPE
            member.linkname = os.path.relpath(target, os.path.realpath(os.path.dirname(path)))
            tar.addfile(member)
            return
        path = target
    try:
        with open(path, "rb") as source:
            found = os.fstat(source.fileno())
            member.size, member.mtime = found.st_size, int(found.st_mtime)
            member.mode = 0o700 if found.st_mode & 0o100 else 0o600
            tar.addfile(member, source)
    except OSError as error:
        raise OpError.from_os(error, "cannot pack the task's file `{}`".format(name)) from error


class _Sink:
    """A file that hashes the written data and reports progress."""

    def __init__(self, fd: int, total: int, on_progress: OnProgress) -> None:
        self._fd = fd
        self._total = total
        self._on_progress = on_progress
        self.digest = hashlib.sha256()
        self.size = 0

    def write(self, data: bytes) -> int:
        """Write all of ``data``."""
        self.digest.update(data)
        view = memoryview(data)
        while view:
            view = view[os.write(self._fd, view) :]
        self.size += len(data)
        self._on_progress(min(self.size, self._total), self._total)
        return len(data)


def _shortened(names: List[str]) -> List[str]:
    more = ["and {} more".format(len(names) - _MAX_NAMED)] if len(names) > _MAX_NAMED else []
    return names[:_MAX_NAMED] + more
