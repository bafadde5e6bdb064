"""The keys of OSMO's language: all keys of distflow's schema without ``x-distflow``.

The name of a key begins with its part of the schema: ``task.name``, ``resource.topology.key``. Keys at the top of the document
have no such prefix.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from distflow.documents.schema import load_schema

__all__ = ["osmo_keys", "used_keys"]

_SCHEMA: Mapping[str, Any] = load_schema("distflow.spec", "workflow.schema.json")


def osmo_keys() -> frozenset[str]:
    """Return every key of OSMO's language."""
    return frozenset(_keys(_SCHEMA, ""))


def used_keys(document: Any) -> frozenset[str]:
    """Return the keys of a document, except those that the schema does not contain."""
    return frozenset(_walk(_SCHEMA, document, ""))


def _keys(part: Mapping[str, Any], prefix: str) -> Iterator[str]:
    part = _resolved(part)
    proposals = "propertyNames" in part  # names of values, for editors, not keys of the language
    for key, value in part.get("properties", {}).items():
        if not value.get("x-distflow") and not proposals:
            yield f"{prefix}{key}"
            yield from _keys(value, _prefix_of(value, f"{prefix}{key}."))
    for keyword in ("items", "additionalProperties"):
        if isinstance(part.get(keyword), dict):
            yield from _keys(part[keyword], _prefix_of(part[keyword], prefix))


def _walk(part: Mapping[str, Any], value: Any, prefix: str) -> Iterator[str]:
    part = _resolved(part)
    if isinstance(value, dict):
        known, others = part.get("properties", {}), part.get("additionalProperties")
        for key, inner in value.items():
            if key in known:
                yield f"{prefix}{key}"
                yield from _walk(known[key], inner, _prefix_of(known[key], f"{prefix}{key}."))
            elif isinstance(others, dict):
                yield from _walk(others, inner, _prefix_of(others, prefix))
    elif isinstance(value, list) and "items" in part:
        for inner in value:
            yield from _walk(part["items"], inner, _prefix_of(part["items"], prefix))


def _prefix_of(part: Mapping[str, Any], prefix: str) -> str:
    """Return the prefix for the keys of a part: the part's name in the schema if it has one, else ``prefix``."""
    return f"{_name(part)}." if "$ref" in part and "properties" in _resolved(part) else prefix


def _resolved(part: Mapping[str, Any]) -> Mapping[str, Any]:
    found: Mapping[str, Any] = _SCHEMA["$defs"][_name(part)] if "$ref" in part else part
    return found


def _name(part: Mapping[str, Any]) -> str:
    return str(part["$ref"]).rpartition("/")[2]
