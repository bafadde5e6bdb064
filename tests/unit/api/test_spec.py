"""Specs as Python values: their YAML, their keys, which are those of the schema, and errors that name the wrong part."""

from __future__ import annotations

import builtins
import json
import types
import typing
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import distflow
from distflow.api import spec as parts
from distflow.api.spec import Group, Ranks, Resources, Spec, Task
from distflow.client.specs import schema_text
from distflow.documents.yaml_parser import parse_yaml
from distflow.errors import InputError
from distflow.spec.parse import load_spec, load_spec_text

NUMBERS = st.integers(0, 10**6)
TEXTS = st.text(max_size=20)
SCALARS = st.one_of(TEXTS, NUMBERS, st.floats(allow_nan=False, allow_infinity=False), st.booleans())


def _values_of(kind: Any) -> st.SearchStrategy[Any]:
    """Return a strategy for the values of a field's type."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return st.one_of([_values_of(arg) for arg in args if arg is not type(None)])
    if origin is list:
        return st.lists(_values_of(args[0]), max_size=2)
    if origin is dict:
        return st.dictionaries(TEXTS, SCALARS if args[1] is Any else _values_of(args[1]), max_size=2)
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return _structs_of(kind)
    return {str: TEXTS, int: NUMBERS, bool: st.booleans(), float: st.floats(0, 1e6)}[kind]


def _structs_of(kind: type[msgspec.Struct]) -> st.SearchStrategy[Any]:
    hints = typing.get_type_hints(kind)
    fields = msgspec.structs.fields(kind)
    needed = {one.name: _values_of(hints[one.name]) for one in fields if one.required}
    others = {one.name: _values_of(hints[one.name]) for one in fields if not one.required}
    return st.fixed_dictionaries(needed, optional=others).map(lambda values: kind(**values))


@settings(max_examples=50)
@given(_structs_of(Spec))
def test_a_spec_is_equal_after_yaml(spec: Spec) -> None:
    text = spec.to_yaml()
    assert Spec.from_yaml(text) == spec
    assert parse_yaml(text, "spec").value == spec.to_dict()


@pytest.mark.parametrize("path", sorted(Path("workflow_specs").glob("*.yaml")), ids=lambda path: path.stem)
def test_each_sample_spec_is_equal_after_yaml(path: Path) -> None:
    rendered, _ = load_spec(str(path))
    spec = Spec.from_yaml(rendered.rendered, file=path.name)
    reloaded, _ = load_spec_text(spec.to_yaml(), path.name, base_dir=path.parent)
    assert (reloaded.name, [group.name for group in reloaded.groups]) == (
        rendered.name,
        [group.name for group in rendered.groups],
    )
    assert Spec.from_yaml(spec.to_yaml()) == spec


def _keys_of(kind: type[msgspec.Struct]) -> set[str]:
    return {one.encode_name for one in msgspec.structs.fields(kind)}


def test_the_parts_have_the_keys_of_the_schema() -> None:
    rules = json.loads(schema_text())["$defs"]
    found = {
        "workflow": _keys_of(Spec) - {"variables"},
        "group": _keys_of(Group),
        "task": _keys_of(Task),
        "ranks": _keys_of(Ranks),
        "resource": _keys_of(Resources),
        "timeout": _keys_of(parts.Timeouts),
        "retry": _keys_of(parts.Retry),
        "elastic": _keys_of(parts.Elastic),
        "notify": _keys_of(parts.Notify),
        "file": _keys_of(parts.File),
        "input": _keys_of(parts.Input),
        "output": _keys_of(parts.Output),
    }
    assert found == {name: set(rules[name]["properties"]) for name in found}
    checkpoint, topology = rules["task"]["properties"]["checkpoint"], rules["resource"]["properties"]["topology"]
    assert _keys_of(parts.Checkpoint) == set(checkpoint["items"]["properties"])
    assert _keys_of(parts.Topology) == set(topology["items"]["properties"])
    assert _keys_of(parts.Shared) == set(rules["group"]["properties"]["shared"]["properties"])
    assert _keys_of(parts.DatasetUpdate) == set(rules["output"]["properties"]["update_dataset"]["properties"])


def test_a_variable_without_a_value_stays_a_variable() -> None:
    text = "workflow: {name: a, tasks: [{name: b, command: ['true']}]}\ndefault-values: {x: null, y: {z: null}}\n"
    spec = Spec.from_yaml(text)
    assert spec.variables == {"x": None, "y": {"z": None}}
    assert Spec.from_yaml(spec.to_yaml()) == spec


def test_strings_of_several_lines_are_block_scalars() -> None:
    spec = Spec(name="hello", tasks=[Task(name="one", command=["bash", "-c", "echo a\necho b\n"])], variables={"epochs": 3})
    assert spec.to_yaml() == (
        "workflow:\n  name: hello\n  tasks:\n  - name: one\n    command:\n    - bash\n    - -c\n    - |\n      echo a\n"
        "      echo b\ndefault-values:\n  epochs: 3\n"
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("workflow: {name: a, tasks: [{name: b, comand: c}]}", r"unknown field `comand` - at `\$\.tasks\[0\]`"),
        ("workflow: {name: a, taks: []}", "unknown field `taks`"),
        ("workflow: {name: 1}", r"Expected `str`, got `int` - at `\$\.name`"),
        ("workflow: {name: a}\nother: 1", "unknown key `other`"),
        ("[]", "spec.yaml is not a mapping"),
        ("workflow: hello", "no mapping `workflow`"),
    ],
)
def test_an_error_names_the_wrong_part(text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        Spec.from_yaml(text, file="spec.yaml")


def test_every_public_name_exists() -> None:
    for name in distflow.__all__:
        assert getattr(distflow, name) is not None
    with pytest.raises(AttributeError, match="has no attribute 'submitt'"):
        _ = distflow.submitt


def test_a_star_import_replaces_no_builtins() -> None:
    assert set(distflow.__all__).isdisjoint(dir(builtins))
    assert distflow.list.__module__ == "distflow.api.workflow"
