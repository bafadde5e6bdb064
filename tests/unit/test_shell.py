"""Quoting and masking, with hostile strings."""

from __future__ import annotations

import re
import subprocess

import pytest

from distflow.shell import MASK, Secret, mask, quote, quote_with_variables

HOSTILE = ["", "a b", "$(id)", "`id`", "a'b", 'a"b', "a\nb", "-n", "*", "\\", "é", "!", "a;b", "~", "#x", "\t"]


@pytest.mark.parametrize("word", HOSTILE)
def test_a_shell_reads_a_quoted_word_unchanged(word: str) -> None:
    done = subprocess.run(["sh", "-c", quote(["printf", "%s|", word, word])], capture_output=True, text=True, check=True)
    assert done.stdout == f"{word}|{word}|"


@pytest.mark.parametrize("word", HOSTILE)
def test_variables_are_expanded_inside_hostile_words(word: str) -> None:
    line = quote_with_variables(f"{word}@@PORT@@{word}", re.compile("@@PORT@@"), lambda _: "PORT")
    done = subprocess.run(["sh", "-c", f"PORT='1 2'; printf %s {line}"], capture_output=True, text=True, check=True)
    assert done.stdout == f"{word}1 2{word}"


def test_the_text_of_a_secret_does_not_contain_its_value() -> None:
    secret = Secret("hunter2")
    assert "hunter2" not in f"{secret} {secret!r} {[secret]}"
    assert secret.reveal() == "hunter2"
    assert secret == Secret("hunter2")


def test_longer_secrets_are_masked_first() -> None:
    assert mask("key=abcdef abc", [Secret("abc"), Secret("abcdef"), Secret("")]) == f"key={MASK} {MASK}"
