"""Decode JSON from an untrusted writer: a node, a shared directory, a manifest, an archive, a network peer.

``json.loads`` alone is unsafe for such input. Deep nesting raises ``RecursionError``, which handlers of ``ValueError`` do not
catch. A number of several hundred digits raises ``OverflowError`` later, when it is converted to a float or stored in a
database. ``NaN`` and infinities break later comparisons. The decoder in this module raises only ``ValueError``.
"""

from __future__ import annotations

import json
import math
import re

from distflow.protocol.light_typing import Any, Union

__all__ = ["MAX_BYTES", "decode_json", "decode_object"]

MAX_BYTES = 1024 * 1024
"""Default maximum size of a document in bytes."""
_MAX_DEPTH = 64
_INT64 = 2**63
_TOKENS = rb'(?s)"[^"\\]*(?:\\.?[^"\\]*)*"?|[\[\]{}]'
"""Strings, also unfinished ones, and brackets. No input makes this pattern backtrack."""


def decode_json(data: Union[bytes, str], *, max_bytes: int = MAX_BYTES, max_depth: int = _MAX_DEPTH) -> Any:
    """Return the value of a JSON document (RFC 8259). Bytes must be UTF-8.

    Raise ``ValueError``, and nothing else, when the document is longer than ``max_bytes``, is nested deeper than ``max_depth``
    arrays and objects, is not JSON, or has a number that does not fit into a signed 64-bit integer or a finite float.
    """
    encoded = data.encode("utf-8", "surrogatepass") if isinstance(data, str) else bytes(data)
    if len(encoded) > max_bytes:
        raise ValueError("the JSON document is longer than {} bytes".format(max_bytes))
    if encoded.count(b"[") + encoded.count(b"{") > max_depth:
        _check_depth(encoded, max_depth)
    return _DECODER.decode(encoded.decode("utf-8") if isinstance(data, (bytes, bytearray)) else data)


def decode_object(data: Union[bytes, str], *, max_bytes: int = MAX_BYTES, max_depth: int = _MAX_DEPTH) -> Any:
    """Return the dictionary of a JSON document whose top level is an object. Raise ``ValueError`` for all other input."""
    value = decode_json(data, max_bytes=max_bytes, max_depth=max_depth)
    if not isinstance(value, dict):
        raise ValueError("the JSON document is not an object")
    return value


def _check_depth(encoded: bytes, max_depth: int) -> None:
    depth = 0
    for token in re.finditer(_TOKENS, encoded):
        first = token.group()[:1]
        if first in b"[{":
            depth += 1
            if depth > max_depth:
                raise ValueError("the JSON document is nested deeper than {} levels".format(max_depth))
        elif first in b"]}":
            depth -= 1


def _integer(text: str) -> int:
    if len(text) > 20 or not -_INT64 <= int(text) < _INT64:
        raise ValueError("a number of the JSON document does not fit into a signed 64-bit integer")
    return int(text)


def _number(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError("a number of the JSON document does not fit into a 64-bit float")
    return value


def _constant(text: str) -> float:
    raise ValueError("{} is not a JSON number".format(text))


_DECODER = json.JSONDecoder(parse_int=_integer, parse_float=_number, parse_constant=_constant)
