"""Check a document against its JSON Schema, and report differences in plain English instead of the validator's messages.

The key ``x-expects`` of the schema describes a value ("a list of strings, such as …"). For values with
``x-checked-by-parser``, patterns and minima are not checked here, because their parser reports better messages.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib import resources
from typing import Any

from distflow.documents.document import Document, Path, path_text
from distflow.documents.problems import Mark, Problem
from distflow.documents.text import did_you_mean, most_similar

__all__ = ["Explain", "load_schema", "schema_problems", "schema_text"]

Explain = Callable[[str, Path, Any, Mapping[str, Any]], "tuple[str, str] | None"]
"""A better message for a finding: (keyword, path, value, schema) → (message, hint), or ``None`` for the default message.

An empty message omits the finding.
"""

_NAMES: Mapping[str, str] = {
    "object": "a mapping (`key: value` lines)",
    "array": "a list",
    "string": "a string",
    "integer": "a whole number",
    "number": "a number",
    "boolean": "true or false",
    "null": "empty",
}

_TEMPLATE = {"$ref": "#/$defs/template"}


def schema_text(package: str, name: str) -> str:
    """Return the text of a schema that ships with a package of distflow."""
    return resources.files(package).joinpath(name).read_text(encoding="utf-8")


def load_schema(package: str, name: str) -> dict[str, Any]:
    """Return a schema that ships with a package of distflow, for documents whose templates have been rendered."""
    schema: dict[str, Any] = _without_templates(json.loads(schema_text(package, name)))
    return schema


def _without_templates(rule: Any) -> Any:
    """Replace each ``{"anyOf": [RULE, <a template>]}`` with RULE. Only editors check documents before rendering."""
    if isinstance(rule, list):
        return [_without_templates(item) for item in rule]
    if not isinstance(rule, dict):
        return rule
    result = {key: _without_templates(value) for key, value in rule.items()}
    if (choices := result.get("anyOf")) and choices[-1] == _TEMPLATE:
        del result["anyOf"]
        return {**choices[0], **result}
    return result


def schema_problems(document: Document, schema: Mapping[str, Any], explain: Explain | None = None) -> tuple[Problem, ...]:
    """Return the differences between the document and the schema as problems."""
    import jsonschema  # noqa: PLC0415  takes 0.1 s, and only commands that read a spec need it

    kind: Any = jsonschema.validators.extend(jsonschema.Draft202012Validator, {"pattern": _pattern_errors})  # type: ignore[no-untyped-call]
    validator = kind(dict(schema))
    return tuple(
        problem for error in validator.iter_errors(document.value) for problem in _problems_of(document, schema, error, explain)
    )


def _pattern_errors(_validator: Any, pattern: str, value: Any, _rule: Mapping[str, Any]) -> Iterator[Any]:
    """Match a pattern whose ``$`` means the end of the text. In Python ``$`` also matches before a final line break."""
    import jsonschema  # noqa: PLC0415  see above

    if isinstance(value, str) and not re.search(re.sub(r"\$$", r"\\Z", pattern), value):
        yield jsonschema.ValidationError(f"{value!r} does not match {pattern!r}")


def _problems_of(document: Document, root: Mapping[str, Any], error: Any, explain: Explain | None) -> Iterator[Problem]:
    path: Path = tuple(error.absolute_path)
    keyword, value, rule = str(error.validator), error.instance, error.schema
    if rule.get("x-checked-by-parser") and keyword in ("pattern", "minimum", "exclusiveMinimum"):
        return
    explained = explain(keyword, path, value, rule) if explain is not None else None
    if explained is not None:
        if explained[0]:
            yield _problem(document.key_mark_at(path), path, *explained)
    elif keyword == "additionalProperties":
        yield from _unknown_keys(document, root, path, value, rule)
    elif keyword == "required":
        # jsonschema reports each missing key separately, and names it only in its message.
        missing = [key for key in rule["required"] if key not in value and f"'{key}'" in error.message]
        # The problem of a mistyped key already suggests the missing one.
        known = rule.get("properties", {})
        mistyped = [key for key in value if key not in known] if rule.get("additionalProperties") is False else []
        missing = [key for key in missing if not any(most_similar(typed, known) == key for typed in mistyped)]
        for key in missing:
            expected = _expected(rule.get("properties", {}).get(key, {}), root)
            shown = f"`{path_text(path)}`" if path else "the document"
            hint = f"add `{key}:`" + (f", {expected}" if expected else "")
            yield _problem(document.mark_at(path), (*path, key), f"{shown} has no `{key}`", hint)
    elif keyword == "propertyNames" or _is_about_a_key(error):
        yield from _invalid_names(document, path, value, error)
    else:
        yield _problem(document.key_mark_at(path), path, *_message_and_hint(document, path, keyword, value, rule, root))


def _is_about_a_key(error: Any) -> bool:
    """Return whether an error is about a key (``propertyNames``), not about a value."""
    return "propertyNames" in error.absolute_schema_path


def _invalid_names(document: Document, path: Path, value: Any, error: Any) -> Iterator[Problem]:
    name = value if isinstance(value, str) else str(error.instance)
    expected = error.schema.get("x-expects", "another name")
    at = (*path, name)
    yield _problem(document.key_mark_at(at), at, f"{_first_line(name)} is not a valid name here", f"write {expected}")


def _unknown_keys(
    document: Document, root: Mapping[str, Any], path: Path, value: Mapping[str, Any], rule: Mapping[str, Any]
) -> Iterator[Problem]:
    known = rule.get("properties", {})
    for key in value:
        if key in known:
            continue
        at = (*path, key)
        where = f"in `{path_text(path)}`" if path else "at the top of the document"
        owners = list(_mappings_with(root, key))
        hint = did_you_mean(key, known, what="keys here")
        if owners and not hint.startswith("did you mean"):
            titles = " and ".join(filter(None, (", ".join(owners[:-1]), owners[-1])))
            hint = f"`{key}` is a key of {titles}; {hint}"
        yield _problem(document.key_mark_at(at), at, f"unknown key `{key}` {where}", hint)


def _mappings_with(root: Mapping[str, Any], key: str) -> Iterable[str]:
    """Return the titles of the mappings in the schema that have this key."""
    candidates = [root, *root.get("properties", {}).values(), *root.get("$defs", {}).values()]
    return [rule["title"] for rule in candidates if "title" in rule and key in rule.get("properties", {})]


def _message_and_hint(
    document: Document, path: Path, keyword: str, value: Any, rule: Mapping[str, Any], root: Mapping[str, Any]
) -> tuple[str, str]:
    name = f"`{path_text(path)}`" if path else "the document"
    expected = _expected(rule, root)
    if value is None and not path:
        return f"{name} is empty", f"it must be {expected}"
    if value is None:
        part = "item" if isinstance(path[-1], int) else "key"
        return f"{name} is empty", f"give it {expected or 'a value'}, or remove the {part}"
    if keyword == "minItems" and not value:
        return f"{name} is an empty list", f"it must be {expected}" if expected else "give it at least one item"
    shown = _shown(document, path, value)
    if keyword == "type" and rule.get("type") == "string" and isinstance(value, bool | int | float):
        kind, raw = "true or false" if isinstance(value, bool) else "a number", document.raw_at(path) or ""
        quoted = f'put it into quotes: "{raw}"' if re.search(rule.get("pattern", ""), raw) else ""
        return f"{name} must be {expected}; YAML reads {shown} as {kind}", quoted
    limit = rule.get(keyword)
    bounds = {
        "minimum": f"at least {limit}",
        "exclusiveMinimum": f"more than {limit}",
        "maximum": f"at most {limit}",
        "maxLength": f"at most {limit} characters long",
        "maxItems": f"at most {limit} items long",
        "maxProperties": f"at most {limit} entries long",
        "minItems": f"at least {limit} items long",
    }
    if keyword in bounds:
        found = f"but it has {len(value)}" if isinstance(value, Mapping | list) else f"not {shown}"
        return f"{name} must be {bounds[keyword]}, {found}", ""
    if keyword == "enum":
        near = most_similar(str(value), [str(choice) for choice in rule["enum"]])
        hint = f"did you mean `{near}`?" if near else ""
        return f"{name} must be one of {', '.join(f'`{choice}`' for choice in rule['enum'])}, not {shown}", hint
    choices = re.fullmatch(r"\^\(([\w|]+)\)\$", str(limit)) if keyword == "pattern" else None
    near = most_similar(str(value), choices[1].split("|")) if choices else None
    return f"{name} must be {expected or 'something else'}, not {shown}", f"did you mean `{near}`?" if near else ""


def _expected(rule: Mapping[str, Any], root: Mapping[str, Any]) -> str:
    """Describe the expected value by ``x-expects``, the referenced schema or the type; empty if the schema has none of them."""
    if "x-expects" in rule:
        return str(rule["x-expects"])
    reference = str(rule.get("$ref", ""))
    if reference.startswith("#/$defs/"):
        return _expected(root["$defs"][reference.removeprefix("#/$defs/")], root)
    kinds = rule.get("type", [])
    return " or ".join(_NAMES[kind] for kind in ([kinds] if isinstance(kinds, str) else kinds))


def _shown(document: Document, path: Path, value: Any) -> str:
    if isinstance(value, Mapping):
        return "a mapping"
    if isinstance(value, list):
        return "a list"
    raw = document.raw_at(path)
    return _first_line(str(value) if raw is None else raw)


def _first_line(text: str) -> str:
    line = text.split("\n", 1)[0]
    return f"`{line[:60]}…`" if len(line) > 60 or line != text else f"`{line}`"


def _problem(where: Mark, path: Path, message: str, hint: str = "") -> Problem:
    return Problem(where=where, message=message, hint=hint, path=path_text(path))
