"""Masks a task's secrets on the node: in its output before that is written, and in its error file after the task has ended.

These texts are masked: every value of 4 characters or more (except for words such as ``true`` and ``none``), each line of 8
characters or more of a multi-line value, and the JSON escapes of all these. Other forms (base64, URL encoding, a part of a
value) are not found.
"""

from __future__ import annotations

import json
import mmap
import os

from distflow.protocol.light_typing import Any, Iterator, List, Optional, Set, Tuple
from distflow.runtime.wire import Json

__all__ = ["MASK", "SECRET_BYTES", "Mask", "StreamMasker", "clean_error", "encoded", "memory", "read_shared", "share"]

MASK = b"********"
SECRET_BYTES = 4 * 1024 * 1024
"""Maximum size of all secrets of one task, as JSON."""
_SHORTEST = 4
_SHORTEST_LINE = 8
_PLAIN = frozenset(("true", "false", "none", "null", "auto", "default"))
"""Words that are not secrets and are common in logs."""
_ERROR_BYTES = 4 * 1024 * 1024


class Mask:
    """The secrets of one task."""

    def __init__(self, values: List[str]) -> None:
        patterns: Set[bytes] = set()
        for value in values:
            for text in _forms(value):
                patterns.add(text.encode("utf-8", "surrogateescape"))
        self._patterns = sorted(patterns)

    def find(self, data: bytes) -> List[Tuple[int, int]]:
        """Return the ranges of secrets in ``data``, sorted. Overlapping and adjacent ranges are merged."""
        found: List[Tuple[int, int]] = []
        for pattern in self._patterns:
            at = data.find(pattern)
            while at >= 0:
                found.append((at, at + len(pattern)))
                at = data.find(pattern, at + 1)
        merged: List[Tuple[int, int]] = []
        for start, end in sorted(found):
            if merged and start <= merged[-1][1]:
                merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
            else:
                merged.append((start, end))
        return merged

    def partial_start(self, data: bytes) -> int:
        """Return the offset of an incomplete secret with which ``data`` may end; the length of ``data`` if there is none."""
        first = len(data)
        for pattern in self._patterns:
            # If data ends with the whole pattern, ``find`` has found it.
            at = data.find(pattern[:1], max(0, len(data) - len(pattern) + 1))
            while 0 <= at < first:
                if pattern.startswith(data[at:]):
                    first = at
                    break
                at = data.find(pattern[:1], at + 1)
        return first

    def data(self, data: bytes) -> bytes:
        """Return ``data`` with secrets masked."""
        return b"".join(_pieces(data, self.find(data), 0, len(data)))

    def text(self, text: str) -> str:
        """Return ``text`` with secrets masked."""
        return self.data(text.encode("utf-8", "surrogateescape")).decode("utf-8", "surrogateescape")

    def tree(self, value: Any) -> Any:
        """Return a JSON value with secrets masked, also in its keys."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, list):
            return [self.tree(one) for one in value]
        if isinstance(value, dict):
            return {self.text(key): self.tree(one) for key, one in value.items()}
        return value


class StreamMasker:
    """Masks data that arrives in pieces, even if a secret is split between them.

    Data is held back only if it may be the beginning of a secret. If it is released before the rest arrives (``flush``), the
    rest of the secret is still recognized and masked.
    """

    def __init__(self, mask: Mask) -> None:
        self._mask = mask
        self._released = b""
        """Released data that may be the beginning of a secret."""
        self._held = b""

    @property
    def holds(self) -> bool:
        """Whether data is held back."""
        return bool(self._held)

    def feed(self, data: bytes) -> bytes:
        """Add a piece. Returns the data that may be written now."""
        return self._release(self._released + self._held + data, is_last=False)

    def flush(self) -> bytes:
        """Return the data that was held back."""
        return self._release(self._released + self._held, is_last=True)

    def _release(self, whole: bytes, is_last: bool) -> bytes:
        found, begin, before = self._mask.find(whole), self._mask.partial_start(whole), len(self._released)
        # A complete secret is masked now, even if its end may be the beginning of another secret.
        cut = max([begin, before, *(end for start, end in found if start < begin < end)])
        if is_last:
            cut = len(whole)
        self._released, self._held = whole[begin:cut], whole[cut:]
        return b"".join(_pieces(whole, found, before, cut))


def _pieces(data: bytes, found: List[Tuple[int, int]], first: int, last: int) -> Iterator[bytes]:
    at = first
    for start, end in found:
        if end <= at or start >= last:
            continue
        yield data[at : max(start, at)]
        yield MASK
        at = end
    yield data[at:last]


def _forms(value: str) -> Iterator[str]:
    whole = value.strip()
    lines = [line.strip() for line in whole.splitlines()]
    wanted = [whole] if len(whole) >= _SHORTEST and whole.lower() not in _PLAIN else []
    if len(lines) > 1:
        wanted += [line for line in lines if len(line) >= _SHORTEST_LINE]
    for text in wanted:
        yield text
        for escaped in (json.dumps(text), json.dumps(text, ensure_ascii=False)):
            yield escaped[1:-1]


def clean_error(directory: str, mask: Optional[Mask]) -> None:
    """Mask the attempt's error file in place, and cut it at 4 MiB. If it cannot be rewritten, it is removed.

    Does nothing if ``mask`` is None.
    """
    if mask is None:
        return
    path = os.path.join(directory, "error.json")
    try:
        fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(fd, "r+b") as file:  # raises `OSError` for a FIFO
            data = file.read(_ERROR_BYTES)
            clean = mask.data(data)
            if clean != data or os.fstat(fd).st_size > len(data):
                file.seek(0)
                file.write(clean)
                file.truncate()
    except FileNotFoundError:
        pass
    except OSError:
        _remove(path)


def _remove(path: str) -> None:
    try:
        os.unlink(path)
    except OSError:
        pass  # a directory, or a read-only file system: it cannot be removed


def memory() -> mmap.mmap:
    """Return memory for secrets that runner and keeper share. Unused pages take no memory."""
    return mmap.mmap(-1, SECRET_BYTES + 1)


def encoded(launch: Json) -> bytes:
    """Return all secrets of a launch as bytes for the shared memory; empty if there are none."""
    values = [str(value) for value in (launch.get("secret_env") or {}).values()]
    values += [str(value) for entry in launch.get("secret_files") or [] for value in entry["files"].values()]
    return json.dumps(values).encode() if values else b""


def share(shared: mmap.mmap, launch: Json) -> Optional[Mask]:
    """Store a launch's secrets in the shared memory, for the runner. Returns their mask, or None if there are none."""
    data = encoded(launch)
    shared[: len(data) + 1] = data + b"\0"
    return read_shared(shared)


def read_shared(shared: mmap.mmap) -> Optional[Mask]:
    """Return the mask for the secrets in the shared memory; None if there are none."""
    data = shared[: shared.find(b"\0", 0)]
    return Mask(json.loads(data.decode())) if data else None
