"""Records as JSON, and back: strict in what is written, tolerant of what an older or newer distflow wrote."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any, TypeVar

import msgspec

__all__ = ["DecodeError", "decode", "encode"]

DecodeError = msgspec.DecodeError

T = TypeVar("T")


def encode(record: object) -> bytes:
    """Return a frozen record as JSON."""
    return msgspec.json.encode(record, enc_hook=_plain)


def decode(data: bytes, kind: type[T]) -> T:
    """Return the record of ``kind`` that ``data`` holds; unknown fields are ignored. Raises ``DecodeError``."""
    return msgspec.json.decode(data, type=kind)


def _plain(value: object) -> Any:
    if isinstance(value, MappingProxyType):
        return dict(value)
    raise NotImplementedError(f"records hold no {type(value).__name__}")
