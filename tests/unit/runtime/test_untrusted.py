"""The decoder of untrusted JSON: it returns valid documents and raises only ``ValueError`` for all others."""

from __future__ import annotations

import json

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from distflow.runtime.untrusted import decode_json, decode_object

DEEP = "[" * 100_000

_numbers = st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False, allow_infinity=False)
_values = st.recursive(
    st.none() | st.booleans() | _numbers | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


@given(_values)
def test_valid_documents_are_decoded_unchanged(value: object) -> None:
    assert decode_json(json.dumps(value)) == value
    assert decode_json(json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogatepass")) == value


@given(st.binary() | st.text() | st.text(alphabet='[]{}",:\\0123456789.eE-n'))
@example(DEEP)
@example('{"a":' * 100_000)
@example("[" * 100 + '"]]"')
@example("9" * 400)
@example("1e999")
@example("[NaN, -Infinity]")
@example(b"\xff\xfe")
@example('"' + '\\"' * 100_000)
@example('["' * 50_000)
def test_any_input_is_decoded_or_refused_with_a_value_error(text: bytes | str) -> None:
    try:
        decode_json(text)
    except ValueError:
        return


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (DEEP, "deeper than 64"),
        ("[" * 65 + "]" * 65, "deeper than 64"),
        ('{"a":"]]]",' * 65, "deeper than 64"),
        ("9" * 400, "64-bit integer"),
        (str(2**63), "64-bit integer"),
        ("-1e999", "64-bit float"),
        ("[NaN]", "NaN"),
        ('"' + "a" * 2**20 + '"', "longer than"),
    ],
)
def test_the_error_names_the_cause(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        decode_json(text)


def test_brackets_in_strings_are_not_nesting() -> None:
    text = json.dumps(["[{" * 200 + '\\"', "\\"] * 40)
    assert decode_json(text) == json.loads(text)
    assert decode_json("[" * 64 + "]" * 64)


def test_decode_object_accepts_only_objects() -> None:
    assert decode_object(b'{"a": 1}') == {"a": 1}
    with pytest.raises(ValueError, match="not an object"):
        decode_object("[1]")
