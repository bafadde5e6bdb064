"""Copy frozen records of either kind, ``msgspec.Struct`` or dataclass, and create them from plain values.

Most records are structs, because Python needs 0.4 ms to define a frozen dataclass, but only 0.02 ms to define a struct, and
there are hundreds. Dataclasses are used in modules that also run on nodes, where msgspec is missing, and in the Python APIs
(except ``distflow.api.spec``).
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, TypeVar

import msgspec

__all__ = ["convert", "decode_json", "replace"]

_T = TypeVar("_T")
_msgspec_lock = threading.RLock()
"""msgspec 0.22 inspects a struct at its first conversion, and crashes the process if two threads do this at the same time."""


def convert(value: object, kind: type[_T]) -> _T:
    """Do what ``msgspec.convert`` does, but safely in several threads at the same time."""
    with _msgspec_lock:
        return msgspec.convert(value, kind)


def decode_json(data: bytes, kind: type[_T]) -> _T:
    """Do what ``msgspec.json.decode`` does, but safely in several threads at the same time."""
    with _msgspec_lock:
        return msgspec.json.decode(data, type=kind)


if TYPE_CHECKING:
    from dataclasses import replace  # mypy checks the names and types of its arguments
else:

    def replace(record, /, **changes):
        """Return a copy of a frozen record with other values in the given fields."""
        if isinstance(record, msgspec.Struct):
            return msgspec.structs.replace(record, **changes)
        import dataclasses  # noqa: PLC0415

        return dataclasses.replace(record, **changes)
