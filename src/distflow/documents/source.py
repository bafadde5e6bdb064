"""Read a file that the user named, with a size limit. Each failure is raised as a problem of the file (``ProblemsFound``)."""

from __future__ import annotations

import itertools
import os
import stat
from collections.abc import Mapping
from types import MappingProxyType

from distflow.documents.problems import Mark, Problem, ProblemsFound
from distflow.documents.text import most_similar

__all__ = ["LIMIT", "decode", "read_bytes", "read_text"]

LIMIT = 4 << 20
"""The maximum size of a document in bytes."""
_YAML = "YAML file"
_MOST_NAMES = 1000
"""The maximum number of names in the directory that are compared with the name of a missing file."""

_FILE_TYPES: Mapping[int, str] = MappingProxyType(
    {
        stat.S_IFDIR: "a directory",
        stat.S_IFIFO: "a named pipe",
        stat.S_IFCHR: "a device",
        stat.S_IFBLK: "a device",
        stat.S_IFSOCK: "a socket",
    }
)


def read_bytes(path: str, *, shown: str | None = None, limit: int = LIMIT, kind: str = _YAML) -> bytes:
    """Return the content of a regular file of at most ``limit`` bytes.

    ``shown`` is its name in messages (default: ``path``), ``kind`` the expected kind of file. Raises ``ProblemsFound``.
    """
    shown = path if shown is None else shown
    try:
        # O_NONBLOCK, because opening a named pipe would wait for its writer.
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise _found(shown, "the file does not exist", _similar_file(path)) from None
    except (OSError, ValueError) as error:
        raise _found(shown, f"the file cannot be read: {_reason(error)}") from None
    try:
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode):
            what = _FILE_TYPES.get(stat.S_IFMT(status.st_mode), "a special file")
            otherwise = ", or use `-` for standard input" if kind == _YAML else ""
            raise _found(shown, f"this is {what}, not a regular file", f"name a {kind}{otherwise}")
        if status.st_size > limit:
            raise _too_large(shown, status.st_size, limit, kind)
        # Read one byte more than allowed: files in /proc report size 0, and a file may grow while it is read.
        with os.fdopen(handle, "rb", closefd=False) as source:
            data = source.read(limit + 1)
    except OSError as error:
        raise _found(shown, f"the file cannot be read: {_reason(error)}") from None
    finally:
        os.close(handle)
    if len(data) > limit:
        raise _too_large(shown, len(data), limit, kind)
    return data


def read_text(path: str, *, shown: str | None = None, limit: int = LIMIT, kind: str = _YAML) -> str:
    """Return the text of a UTF-8 file, as ``decode`` does. Arguments are those of ``read_bytes``. Raises ``ProblemsFound``."""
    data = read_bytes(path, shown=shown, limit=limit, kind=kind)
    return decode(data, shown=path if shown is None else shown, limit=limit, kind=kind)


def decode(data: bytes, *, shown: str, limit: int = LIMIT, kind: str = _YAML) -> str:
    """Decode ``data`` from UTF-8. The result has no byte order mark, and all its line ends are line feeds.

    Raises ``ProblemsFound`` if ``data`` is too large, binary or not UTF-8.
    """
    if len(data) > limit:
        raise _too_large(shown, len(data), limit, kind)
    if b"\0" in data:
        line = data.count(b"\n", 0, data.index(b"\0")) + 1
        raise _found(shown, "this is binary data (it contains a NUL byte), not text", f"name a {kind} in UTF-8", line=line)
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        message = f"the file is not UTF-8: byte 0x{data[error.start]:02x} at offset {error.start}"
        raise _found(shown, message, "save the file as UTF-8", line=line) from None
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _found(shown: str, message: str, hint: str = "", *, line: int = 0) -> ProblemsFound:
    return ProblemsFound([Problem(where=Mark(shown, line), message=message, hint=hint)])


def _similar_file(path: str) -> str:
    """Return a hint for a missing file: the most similar name in its directory, or what to check."""
    folder, name = os.path.split(path)
    try:
        with os.scandir(folder or ".") as entries:
            names = [entry.name for entry in itertools.islice(entries, _MOST_NAMES)]
    except OSError:
        return f"check the path: the directory `{folder or '.'}` does not exist or cannot be read"
    near = most_similar(name, names)
    if near is not None:
        return f"did you mean `{os.path.join(folder, near)}`?"
    return "check the path" if os.path.isabs(path) else "check the path; it is relative to the current directory"


def _too_large(shown: str, size: int, limit: int, kind: str) -> ProblemsFound:
    found, most = _megabytes(size), _megabytes(limit)
    message = f"the file is too large: {found}, and the maximum is {most}"
    if found == most:  # rounded, or only the first bytes were read
        message = f"the file is too large: the maximum is {most}"
    hint = "name a spec; to send a large file with it, use `localpath`" if kind == _YAML else f"name a {kind}"
    return _found(shown, message, hint)


def _megabytes(size: int) -> str:
    return f"{size / (1 << 20):.4g} MiB"


def _reason(error: OSError | ValueError) -> str:
    return (error.strerror or str(error)) if isinstance(error, OSError) else str(error)
