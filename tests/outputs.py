"""Compare the JSON output of commands with the schemas that ``distflow schema --output`` prints."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import jsonschema

from distflow.client.specs import output_schema_text

__all__ = ["assert_documented"]


def assert_documented(document: object, name: str) -> None:
    """Fail if the output of a command lacks a key of its schema, has another type, or has a key that the schema lacks."""
    errors = [f"{error.json_path}: {error.message}" for error in _validator(name).iter_errors(document)]
    assert not errors, errors


@cache
def _validator(name: str) -> Any:
    schema = json.loads(output_schema_text(name))
    shared = schema["$defs"]["workflow"]  # the rules that refer to it add further keys
    _close(schema, shared)
    return jsonschema.Draft202012Validator(schema)


def _close(rule: Any, shared: object) -> None:
    """Forbid unknown keys in each object of a schema."""
    if isinstance(rule, dict):
        for inner in list(rule.values()):
            _close(inner, shared)
        if "required" in rule and rule is not shared:
            rule["unevaluatedProperties"] = False
    elif isinstance(rule, list):
        for inner in rule:
            _close(inner, shared)
