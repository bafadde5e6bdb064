"""Ids, names and times have the same keys in the JSON output of all commands, and each time has its zone (docs/ci.md)."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from distflow.client.specs import output_schema_text
from distflow.documents.quantities import ZONED, times

SOURCES = Path(__file__).resolve().parents[3] / "src" / "distflow"
SCHEMAS = ("query", "list", "submit", "events", "outputs", "why", "pool-check", "notification")
NAMES = {"task", "group", "node"}
DURATIONS = {"queued_time"}
"""Keys of OSMO that end like keys of times, but are durations."""


def objects(rule: Any) -> Iterator[dict[str, Any]]:
    """Yield the rules of all objects in a schema."""
    if isinstance(rule, dict):
        if "properties" in rule:
            yield rule
        rule = list(rule.values())
    if isinstance(rule, list):
        for inner in rule:
            yield from objects(inner)


def kind(rule: dict[str, Any]) -> str:
    return str(rule.get("$ref", "")).rpartition("/")[2]


@pytest.mark.parametrize("name", SCHEMAS)
def test_schemas_have_each_time_with_its_zone_and_each_workflow_with_its_ids(name: str) -> None:
    schema = json.loads(output_schema_text(name))
    assert schema["$ref"].rpartition("/")[2] in schema["$defs"]
    found = 0
    for rule in objects(schema["$defs"]):
        keys = rule["properties"]
        for key in NAMES & keys.keys():
            assert f"{key}_name" in keys.keys() & set(rule["required"]), key
        for key, value in keys.items():
            is_time = kind(value) in ("time", "zoned_time")
            if key.endswith(("_time", "_until")) or key in ("time", "since"):
                assert is_time or key in DURATIONS, key
            if key.endswith("_at") or key == "at":
                assert kind(value) == "zoned_time", key
            elif is_time:
                assert {key, ZONED[key]} <= keys.keys() & set(rule["required"]), key
                found += 1
        if {"uuid", "workflow_uuid"} & keys.keys():
            assert {"workflow_id", "workflow_uuid"} <= keys.keys() & set(rule["required"])
    assert found > 10


def test_all_documents_in_the_code_use_these_keys() -> None:
    """Search the code for documents, because most commands have no schema."""
    paths = [*(SOURCES / "cli").rglob("*.py"), *(SOURCES / "client" / "notifications").rglob("*.py")]
    paths = [path for path in paths if path.name != "app.py"]  # it has a table of commands
    paths.append(SOURCES / "plan" / "render.py")
    names = 0
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Dict):
                continue
            keys = {key.value for key in node.keys if isinstance(key, ast.Constant)}
            location = f"{path.name}:{node.lineno}"
            for value in node.values:
                is_iso = isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id == "iso"
                assert not is_iso, f"{location}: write **times(…)"
            assert not NAMES & keys, f"{location}: write **name_keys(…)"
            for key, value in zip(node.keys, node.values, strict=True):
                named = re.search(r"\b(task|group|node)(\.name)?$", ast.unparse(value))
                if isinstance(key, ast.Constant) and key.value == "name" and named is not None:
                    assert f"{named[1]}_name" in keys, location
                    names += 1
            if "uuid" in keys:
                unpacked = {ast.unparse(value.func) for value in node.values if isinstance(value, ast.Call)}
                assert "workflow_key" in unpacked or {"workflow_id", "workflow_uuid"} <= keys, (
                    f"{location}: write **workflow_key(…)"
                )

    assert names > 5


def test_times_are_written_with_and_without_their_zone() -> None:
    assert times(submit_time=0.5, since=None) == {
        "submit_time": "1970-01-01T00:00:00.500", "submitted_at": "1970-01-01T00:00:00.500Z", "since": None, "began_at": None,
    }  # fmt: skip
