"""Events: each kind has a code and a sentence, and its stored fields are read back unchanged."""

from __future__ import annotations

import types
import typing
from typing import Any

import msgspec
import pytest

from distflow.state import event_details
from distflow.state.event_details import EventDetails, Message, NodeBecameUnreachable, read_details, write_fields
from distflow.state.event_text import event_text

KINDS: tuple[type[EventDetails], ...] = typing.get_args(EventDetails)
VALUES: dict[object, Any] = {str: "x", int: 2, float: 2.0, bool: True}


def _example(kind: type[EventDetails]) -> EventDetails:
    """Return an event with a value in each field."""
    hints = typing.get_type_hints(kind, vars(event_details))
    values: dict[str, Any] = {field.name: _value(hints[field.name]) for field in msgspec.structs.fields(kind)}
    return kind(**values)


def _value(hint: Any) -> Any:
    origin = typing.get_origin(hint)
    if origin is tuple:
        return ("x",)
    if origin is types.UnionType:
        return _value(typing.get_args(hint)[0])
    return VALUES[hint] if hint in VALUES else {"x": _value(typing.get_args(hint)[1])}


def test_each_kind_has_a_unique_code() -> None:
    codes = [kind.code for kind in KINDS if kind is not Message]
    assert len(set(codes)) == len(codes)
    assert None not in codes


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_has_a_sentence_and_is_read_back_unchanged(kind: type[EventDetails]) -> None:
    details = _example(kind)
    assert event_text(details, group=None, task=None)
    if not isinstance(details, Message):
        fields = write_fields(details)
        assert read_details(code=details.code, fields=fields, kind=details.kind, text="") == details


def test_a_kind_that_only_a_newer_distflow_knows_is_shown_by_its_code() -> None:
    assert read_details(code="new", fields='{"a":1}', kind="state", text="") == Message(kind="state", text="new")


def test_a_sentence_names_the_task_or_the_group() -> None:
    down = NodeBecameUnreachable(node="n1", error="no route")
    assert event_text(down, group=None, task=None) == "n1: unreachable: no route"
    status = event_details.TaskStatus(status="FAILED", message="exit code 1")
    assert event_text(status, group="g", task="t") == "t: FAILED: exit code 1"
    assert event_text(event_details.HangOver(), group="g", task=None) == "g: makes progress again"
