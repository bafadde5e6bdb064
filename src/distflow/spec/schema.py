"""The published JSON Schema of workflow specs, and its findings in words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from distflow.documents.document import Document, Path, path_text
from distflow.documents.problems import Problem
from distflow.documents.schema import load_schema, schema_problems
from distflow.documents.schema import schema_text as _schema_text

__all__ = ["schema_text", "spec_problems"]

_PACKAGE = "distflow.spec"
_FILE = "workflow.schema.json"


def schema_text() -> str:
    """Return the schema as it is published; ``distflow schema`` prints it."""
    return _schema_text(_PACKAGE, _FILE)


def spec_problems(document: Document) -> tuple[Problem, ...]:
    """Return everything in which a rendered spec differs from the schema."""
    return schema_problems(document, load_schema(_PACKAGE, _FILE), _explain)


def _explain(keyword: str, path: Path, value: Any, rule: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return better words where the usual ones would leave a person alone."""
    if keyword == "oneOf":
        return _one_of(path, value, rule)
    if keyword == "type" and path and path[-1] in ("command", "args") and isinstance(value, str):
        hint = 'write it as a list: ["bash", "-c", "…"], or one item for each word'
        return f"`{path_text(path)}` must be a list of texts, not one text", hint
    if path[-1:] == ("exitActions",) and isinstance(value, str) and value.upper() == "RESTART":
        return "`RESTART` is not an exit action", "write RESCHEDULE: the group is tried again, as often as its `retry` allows"
    if path == ("version",):
        return "`version` must be 2", "2 is the only version of the language; remove the line or write `version: 2`"
    if keyword == "required" and not path and isinstance(value, Mapping) and {"tasks", "groups"} & set(value):
        return "the document has no `workflow`", "indent `name`, `tasks` and so on below `workflow:`"
    return None


def _one_of(path: Path, value: Mapping[str, Any], rule: Mapping[str, Any]) -> tuple[str, str] | None:
    """Explain the two places that want one of two keys; an empty message where OSMO accepts what the schema does not."""
    one, other = (choice["required"][0] for choice in rule["oneOf"])
    name = path_text(path)
    if one == "contents":
        if one in value and other in value:
            return f"`{name}` has both `contents` and `localpath`", "keep one: the text itself, or the file that holds it"
        return (
            f"`{name}` has neither `contents` nor `localpath`",
            "give the text itself (`contents: |`), or the file that holds it (`localpath:`)",
        )
    if value.get(one) and value.get(other):
        return (
            "`workflow` has both `tasks` and `groups`",
            "keep `groups` and move the tasks into one of them: tasks of a group start and stop together",
        )
    if one in value and other in value:
        return (
            ("", "")
            if value.get(one) or value.get(other)
            else ("`workflow` has no tasks", "give it `tasks`, or `groups` with tasks")
        )
    return (
        "`workflow` has neither `tasks` nor `groups`",
        "give it `tasks`, or `groups` (tasks of a group start and stop together)",
    )
