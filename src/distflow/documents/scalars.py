"""The types of YAML scalars: those of YAML 1.1, without conversions that surprise users."""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType

__all__ = ["CORE", "WrittenFloat", "argument_value", "resolve", "scalar_value"]

CORE: Mapping[str, str] = MappingProxyType(
    {f"tag:yaml.org,2002:{name}": name for name in ("str", "int", "float", "bool", "null")}
    | {"tag:yaml.org,2002:seq": "list", "tag:yaml.org,2002:map": "map"}
)
"""Supported tags, with the name of each type."""

# As PyYAML (and so OSMO) resolves them, except that dates, sexagesimal numbers and those with a leading zero stay text.
_PATTERNS: tuple[tuple[str, re.Pattern[str]], ...] = (
    ("null", re.compile(r"~|null|Null|NULL|")),
    ("bool", re.compile(r"yes|Yes|YES|no|No|NO|true|True|TRUE|false|False|FALSE|on|On|ON|off|Off|OFF")),
    ("int", re.compile(r"[-+]?(?:0|[1-9][0-9_]*|0x_*[0-9a-fA-F][0-9a-fA-F_]*|0b_*[01][01_]*)")),
    (
        "float",
        re.compile(
            r"[-+]?(?:[0-9][0-9_]*\.[0-9_]*|\.[0-9][0-9_]*)(?:[eE][-+][0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)"
        ),
    ),
)
_TRUE = frozenset({"yes", "true", "on"})
_FALSE = frozenset({"no", "false", "off"})
_MAX_DIGITS = 4000
"""Longer numbers stay text: Python refuses to convert them."""


class WrittenFloat(float):
    """A number that prints as it was written, so that ``3.10`` in a template stays ``3.10``."""

    written: str

    def __str__(self) -> str:
        """Return the number as written."""
        return self.written


def resolve(raw: str) -> str:
    """Return the type that a scalar without quotes has: ``null``, ``bool``, ``int``, ``float`` or ``str``."""
    if len(raw) > _MAX_DIGITS:
        return "str"
    return next((kind for kind, pattern in _PATTERNS if pattern.fullmatch(raw)), "str")


def scalar_value(kind: str, raw: str) -> str | int | float | bool | None:
    """Return the value of a scalar of a known type; raises ``ValueError`` when its text does not fit."""
    if kind == "str":
        return raw
    if kind == "null":
        return None
    if kind == "bool":
        word = raw.lower()
        if word not in _TRUE | _FALSE:
            raise ValueError(raw)
        return word in _TRUE
    digits = raw.replace("_", "").lower()
    if kind == "int":
        return int(digits, {"0x": 16, "0b": 2}.get(digits.lstrip("+-")[:2], 10))
    if kind == "float":
        number = WrittenFloat(digits.replace(".inf", "inf").replace(".nan", "nan"))
        number.written = raw
        return number
    raise ValueError(kind)


def argument_value(raw: str) -> str | int | float | bool:
    """Return the value of ``--set name=raw``: a YAML number, true or false, or else a text.

    Unlike in a file, ``no``, ``~`` and an empty value stay text. On a command line they are country codes, home directories and
    empty texts.
    """
    kind = resolve(raw)
    if kind == "bool" and raw.lower() not in ("true", "false"):
        return raw
    value = scalar_value(kind, raw)
    return raw if value is None else value
