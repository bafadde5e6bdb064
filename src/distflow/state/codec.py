"""Convert records to JSON and back. Writing is strict; reading accepts records of older and newer versions of distflow."""

from __future__ import annotations

import json
from types import MappingProxyType
from typing import Any, TypeVar

import msgspec

from distflow.structs import decode_json

__all__ = ["DecodeError", "decode", "encode", "writable"]

DecodeError = msgspec.DecodeError

T = TypeVar("T")


def encode(record: object) -> bytes:
    """Return a record as JSON. Texts that cannot be encoded are converted with ``writable``."""
    try:
        return msgspec.json.encode(record, enc_hook=_plain)
    except UnicodeEncodeError:
        plain = json.dumps(msgspec.to_builtins(record, enc_hook=_plain), ensure_ascii=False)
        return msgspec.json.encode(json.loads(writable(plain)))


def writable(text: str) -> str:
    """Return a text with ``?`` for surrogates, which UTF-8 cannot encode: bytes of file names, or halves of UTF-16 pairs.

    Nodes and tasks may send any text. Such a text must not prevent distflow from writing the rest of a record.
    """
    return text.encode("utf-8", "replace").decode()


def decode(data: bytes, kind: type[T]) -> T:
    """Return the record of ``kind`` in ``data``; unknown fields are ignored. Raises ``DecodeError``."""
    return decode_json(data, kind)


def _plain(value: object) -> Any:
    if isinstance(value, MappingProxyType):
        return dict(value)
    raise NotImplementedError(f"records cannot contain a {type(value).__name__}")
