"""The YAML parser: values without the traps of YAML 1.1, the line of each part, duplicates, and limits."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from distflow.documents.document import Document, path_text
from distflow.documents.problems import Mark, ProblemsFound, Severity
from distflow.documents.yaml_parser import MAX_DEPTH, parse_yaml


def parsed(text: str, line_map: tuple[int, ...] = ()) -> Document:
    return parse_yaml(text, "f.yaml", line_map)


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("on", True),
        ("No", False),
        ("12", 12),
        ("-0x1F", -31),
        ("0b11", 3),
        ("0x_F", 15),
        ("0x_", "0x_"),
        ("0b_", "0b_"),
        ("1_000", 1000),
        ("1.50", 1.5),
        ("~", None),
        ("", None),
        # YAML 1.1 reads these as an octal number, a number in base 60, a date and a float. They stay texts.
        ("010", "010"),
        ("12:30:45", "12:30:45"),
        ("2024-01-31", "2024-01-31"),
        ("1e3", "1e3"),
        ('"on"', "on"),
        ("!!str 5", "5"),
        ("!!int '5'", 5),
        ("! 5", "5"),
        ("9" * 5000, "9" * 5000),
    ],
)
def test_scalars_are_converted_to_values(written: str, value: object) -> None:
    found = parsed(f"a: {written}\n").value["a"]
    assert found == value
    assert isinstance(found, type(value))


@pytest.mark.parametrize("written", ["on", "010", "1.50", "2024-01-31", "0x1F", "~"])
def test_the_written_form_of_a_value_is_kept(written: str) -> None:
    assert parsed(f"a: {written}").raw_at(("a",)) == written


def test_text_at_returns_the_written_text_or_none() -> None:
    document = parsed("a: yes\nb: ~\nc:\nd: [x]\n")
    text = document.text_at(("a",))
    assert text is not None
    assert (text.value, text.mark.line, text.mark.column) == ("yes", 1, 4)
    assert document.text_at(("b",)) is document.text_at(("c",)) is document.text_at(("d",)) is document.text_at(("no",)) is None


def test_keys_are_texts_as_written() -> None:
    assert parsed("on: 1\n5: 2\nnull: 3\n").value == {"on": 1, "5": 2, "null": 3}


@pytest.mark.parametrize("tag", ["null", "bool", "int", "float"])
def test_a_value_that_does_not_fit_its_tag_is_refused(tag: str) -> None:
    with pytest.raises(ProblemsFound, match=f"the tag `!!{tag}` does not fit the value `foo`\n    remove the tag"):
        parsed(f"a: !!{tag} foo\n")
    with pytest.raises(ProblemsFound, match=f"the tag `!!{tag}` does not fit a mapping\n    remove the tag"):
        parsed(f"a: !!{tag} {{b: 1}}\n")
    assert parsed("a: !!null\nb: !!null '~'\n").value == {"a": None, "b": None}


def test_every_part_has_its_line() -> None:
    document = parsed("a:\n  - x\n  - {b: 1,\n     c: 2}\n")
    lines = {path_text(path): (place.key.line, place.mark.line) for path, place in document.places.items()}
    assert lines == {"": (1, 1), "a": (1, 2), "a[0]": (2, 2), "a[1]": (3, 3), "a[1].b": (3, 3), "a[1].c": (4, 4)}


def test_a_missing_path_has_the_mark_of_its_nearest_parent() -> None:
    document = parsed("a:\n  b: 1\n")
    assert document.key_mark_at(("a", "nothing", 3)).line == 1
    assert parsed("").mark_at(("a",)).line == 0


@pytest.mark.parametrize(
    ("text", "value", "lines"),
    [
        ("a: |\n  x\n  y\n", "x\ny\n", [2, 3]),
        ("a: |\n\n  x\n", "\nx\n", [2, 3]),
        ("a: |-  # why\n  x\n\n\n  y\n", "x\n\n\ny", [2, 3, 4, 5]),
        ("a: >\n  x\n  y\n\n  z\n", "x y\nz\n", [2, 5]),
        ("a: >-\n  x\n   deep\n  z\n", "x\n deep\nz", [2, 3, 4]),
        ("a: 'x\n\n  y'\n", "x\ny", [1, 3]),
        ("a: x\n\n\n  y\n", "x\n\ny", [1, 3, 4]),
    ],
)
def test_every_line_of_a_scalar_has_its_line_number_in_the_file(text: str, value: str, lines: list[int]) -> None:
    found = parsed(text).text_at(("a",))
    assert found is not None
    assert found.value == value
    assert [mark.line for mark in found.lines] == lines
    assert found.mark_at(value.rindex(value.strip()[-1])).line == lines[-1]


def test_a_scalar_with_an_escaped_line_break_has_only_its_first_line_number() -> None:
    found = parsed('a: 1\nb: "x\\ny"\n').text_at(("b",))
    assert found is not None
    assert (found.lines, found.mark_at(2).line) == ((), 2)


def test_line_breaks_that_editors_do_not_count_are_not_counted() -> None:
    assert parsed("a: 'x\u2028y\u0085z'\nb: 1\n").key_mark_at(("b",)).line == 2


def test_the_line_map_replaces_line_numbers() -> None:
    assert parsed("a: 1\nb: 2\nc: 3\n", (10, 20)).key_mark_at(("b",)).line == 20
    assert parsed("a: 1\nb: 2\nc: 3\n", (10, 20)).key_mark_at(("c",)).line == 20


def test_aliases_and_merge_keys_expand() -> None:
    document = parsed("x: &x {a: 1, b: 2}\ny: {<<: *x, b: 3}\nz: {<<: [{a: 8}, *x]}\nw: [*x]\n")
    assert document.value["y"] == {"a": 1, "b": 3}
    assert document.value["z"] == {"a": 8, "b": 2}
    assert document.value["w"] == [{"a": 1, "b": 2}]
    assert document.key_mark_at(("y", "b")).line == 2
    assert document.key_mark_at(("y", "a")).line == 1


def test_a_duplicate_key_with_an_equal_value_is_a_warning_with_both_lines() -> None:
    document = parsed("a:\n  b: {c: [1, x]}\n  d: 2\n  b: {c: [1, x]}\n")
    assert document.value == {"a": {"b": {"c": [1, "x"]}, "d": 2}}
    (warning,) = document.warnings
    assert (warning.where.line, warning.path, warning.severity) == (4, "a.b", Severity.WARNING)
    assert "line 2" in warning.hint


@pytest.mark.parametrize("second", ["{c: 2}", "{d: 1}", "{c: '1'}", "{c: 1.0}", "{c: 1, d: 1}", "[c, 1]", "", "{c: [1]}"])
def test_a_duplicate_key_with_another_value_is_refused(second: str) -> None:
    with pytest.raises(ProblemsFound, match="given twice, with different values"):
        parsed(f"b: {{c: 1}}\nb: {second}\n")


def nested_anchors(count: int) -> str:
    return "a0: &a0 [1]\n" + "".join(f"a{i}: &a{i} [*a{i - 1}]\n" for i in range(1, count))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[" * 100_000, "nested more than 100 levels"),
        ("{a: " * 100_000, "nested more than 100 levels"),
        ("- " * 50_000, "nested more than 100 levels"),
        ("- a\n" * 200_000, "more than 100,000 keys and values"),
        ("a: &a {x: 1}\n" + "".join(f"b{i}: &b{i} {{<<: [*a, *a]}}\n" for i in range(30_000)), "values"),
        (
            "m0: &m0 {x: 1}\n" + "".join(f"m{i}: &m{i} {{<<: [*m{i - 1}, *m{i - 1}]}}\n" for i in range(1, 60)),
            "expand to more than",
        ),
        (
            "m0: &m0 {x: 1}\n" + "".join(f"m{i}: &m{i} {{<<: *m{i - 1}}}\n" for i in range(1, 5000)),
            "expand to more than 100 levels",
        ),
        (nested_anchors(5000), "expand to more than 100 levels"),
        ("a: &a [*a]", "is inside the value of its own anchor `&a`"),
    ],
    ids=["lists", "maps", "dashes", "wide", "merges", "merge-bomb", "merge-chain", "alias-chain", "self"],
)
def test_hostile_documents_are_refused_quickly(text: str, words: str) -> None:
    begun = time.process_time()
    with pytest.raises(ProblemsFound, match=words):
        parsed(text)
    assert time.process_time() - begun < 20


def test_a_document_as_deep_as_allowed_is_read() -> None:
    assert parsed("[" * MAX_DEPTH + "]" * MAX_DEPTH).value


GOLDENS = sorted((Path(__file__).parents[2] / "goldens").rglob("*.yaml"))


@pytest.mark.parametrize("path", GOLDENS, ids=lambda path: path.stem)
def test_libyaml_and_the_pure_parser_give_the_same_values_and_lines(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = path.read_text(encoding="utf-8")

    def outcome() -> tuple[object, dict[str, tuple[Mark, int]]] | None:
        try:
            document = parsed(text)
        except ProblemsFound:
            return None
        return document.value, {path_text(at): (place.key, place.mark.line) for at, place in document.places.items()}

    fast = outcome()
    monkeypatch.delattr(yaml, "CSafeLoader")
    # Only the lines of values are compared, because the parsers report different columns for an empty value.
    assert outcome() == fast


NAMES = st.text("abcxyz_é𝄞", min_size=1, max_size=6).filter(lambda name: name not in ("y", "Y"))
TEXTS = st.text(st.characters(exclude_categories=("Cs", "Cc", "Co"), exclude_characters="\u2028\u2029\x85\ufeff"), max_size=20)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-999, 999) | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=12,
)


@given(value=st.dictionaries(NAMES, VALUES, min_size=1, max_size=4), flow=st.booleans())
def test_a_document_that_pyyaml_writes_is_read_back_unchanged(value: dict[str, object], flow: bool) -> None:
    text = yaml.safe_dump(value, default_flow_style=flow, allow_unicode=True, sort_keys=False)
    document = parsed(text)
    assert document.value == value
    for name in value:
        line = text.split("\n")[document.key_mark_at((name,)).line - 1]
        column = document.key_mark_at((name,)).column - 1
        assert line[column:].lstrip("'\"? ").startswith(name)


@given(lines=st.lists(st.text("ab {}%", max_size=5).map(str.rstrip), min_size=1, max_size=8))
def test_each_line_of_a_literal_block_has_its_line_number(lines: list[str]) -> None:
    lines = [*lines, "end"]
    text = "key: |2\n" + "".join(f"  {line}\n" if line else "\n" for line in lines)
    found = parsed(text).text_at(("key",))
    assert found is not None
    assert found.value.split("\n")[:-1] == lines
    marks = found.lines or (found.mark,)
    assert [text.split("\n")[mark.line - 1].strip() for mark in marks] == [line.strip() for line in lines]
