"""The parser of shell text: the words of each command, and arbitrary text."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distflow.layout.claims.shell_commands import read_commands

PIECES = [
    "'",
    '"',
    "\\",
    "\n",
    "\r\n",
    "$",
    "${",
    "$(",
    "`",
    "{{",
    "}}",
    "<<E",
    "E",
    "#",
    ";",
    "&&",
    "(",
    ")",
    "a",
    "=",
    " ",
    ">",
]


def words(text: str, **variables: str) -> list[list[str | None]]:
    return [[word.expanded(variables) for word in command.words] for command in read_commands(text)]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("a b\\\n c", [["a", "b", "c"]]),
        ("a b\\\r\n c\r\n", [["a", "b", "c"]]),
        ("a 'x y'\"z $V\"", [["a", "x yz 1"]]),
        ("a ${V} ${W:-2} ${W-3} $(date) `date` $((1 + 2)) $1", [["a", "1", "2", "3", None, None, None, None]]),
        ("a {{ host:m }}:1 {{rank_size}}", [["a", "{{ host:m }}:1", "{{rank_size}}"]]),
        ("a#b #c", [["a#b"]]),
        ("a 2>&1 >x <y b", [["a", "b"]]),
        ("X=1 Y='2 3' env Z=4 a", [["a"]]),
        ("a && b || c | d & e; (f)", [["a"], ["b"], ["c"], ["d"], ["e"], ["f"]]),
        ("a <<E <<'F' b\nx\nE\ny\nF\nc", [["a", "b"], ["c"]]),
        ("a <<\\E b\nx\nE\nc", [["a", "b"], ["c"]]),
        ("a <<'END OF X' b\nx\nEND OF X\nc", [["a", "b"], ["c"]]),
        ("a <<!\nx\n!\nc", [["a"], ["c"]]),
        ("a <<< word b", [["a", "b"]]),
        ("a $(echo ')' \"(\") b", [["a", None, "b"]]),
        ("if (( 1 << (n) )); then\na; fi\nb", [["a"], ["fi"], ["b"]]),
        ("((a; b); c)", [["a"], ["b"], ["c"]]),
    ],
)
def test_words_are_split_as_by_a_shell(text: str, found: list[list[str | None]]) -> None:
    assert words(text, V="1") == found


def test_offsets_in_here_documents_are_offsets_in_the_whole_text() -> None:
    text = "set -e\nbash <<E\n  a b\nE\n"
    assert [text[command.words[0].offset] for command in read_commands(text)] == ["s", "b", "a"]


@settings(max_examples=500)
@given(st.lists(st.sampled_from(PIECES), max_size=40))
def test_any_text_can_be_parsed(pieces: list[str]) -> None:
    text = "".join(pieces)
    for command in read_commands(text):
        assert all(text[word.offset :].startswith(word.raw) for word in command.words if word.raw)


def test_a_large_script_is_parsed_within_a_minute() -> None:
    began = time.perf_counter()
    read_commands("python3 train.py --offset 8 \\\n --size 8 'a b' # comment\n" * 10_000)
    assert time.perf_counter() - began < 60
