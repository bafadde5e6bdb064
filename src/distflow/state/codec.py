"""Records as JSON, and back: strict in what is written, tolerant of what an older or newer distflow wrote."""

from __future__ import annotations

import json
from types import MappingProxyType
from typing import Any, TypeVar

import msgspec

__all__ = ["DecodeError", "decode", "encode", "writable"]

DecodeError = msgspec.DecodeError

T = TypeVar("T")


def encode(record: object) -> bytes:
    """Return a frozen record as JSON, with its texts as ``writable`` has them."""
    try:
        return msgspec.json.encode(record, enc_hook=_plain)
    except UnicodeEncodeError:
        plain = json.dumps(msgspec.to_builtins(record, enc_hook=_plain), ensure_ascii=False)
        return msgspec.json.encode(json.loads(writable(plain)))


def writable(text: str) -> str:
    """Return a text without what cannot be encoded: bytes of a file's name that are no UTF-8, halves of UTF-16 pairs.

    Nodes and tasks say what they like, and no word of theirs may keep the rest of a record from being written.
    """
    return text.encode("utf-8", "replace").decode()


def decode(data: bytes, kind: type[T]) -> T:
    """Return the record of ``kind`` that ``data`` holds; unknown fields are ignored. Raises ``DecodeError``."""
    return msgspec.json.decode(data, type=kind)


def _plain(value: object) -> Any:
    if isinstance(value, MappingProxyType):
        return dict(value)
    raise NotImplementedError(f"records hold no {type(value).__name__}")
