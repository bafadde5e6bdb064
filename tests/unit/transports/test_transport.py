"""Command lines for a login shell: every shell passes the arguments unchanged."""

from __future__ import annotations

import shutil
import subprocess

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distflow.transports.ssh.transport import remote_command

WORDS = [
    "",
    "a b",
    "a'b",
    'a"b',
    "$HOME",
    "`id`",
    "a\nb\n",
    "*",
    "ü→",
    "-n",
    "\\",
    "\\n\\0",
    "!x",
    "~",
    "=ls",
    "%d%%",
    "a\tb",
    "#",
    "{a,b}",
]


@pytest.mark.parametrize("shell", ["sh", "dash", "bash", "zsh", "fish", "tcsh", "busybox"])
def test_arguments_arrive_unchanged(shell: str) -> None:
    path = shutil.which(shell)
    if path is None:
        pytest.skip(f"{shell} is not installed")
    command = [path, *(["sh"] if shell == "busybox" else []), "-c", remote_command(["printf", "%s\\0", *WORDS])]
    done = subprocess.run(command, capture_output=True, check=False, timeout=20)
    assert done.stdout.decode().split("\0")[:-1] == WORDS, done.stderr


@settings(max_examples=40)
@given(st.lists(st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"])), min_size=1, max_size=5))
def test_any_text_arrives_unchanged(words: list[str]) -> None:
    done = subprocess.run(
        ["sh", "-c", remote_command(["printf", "%s\\0", *words])], capture_output=True, check=True, timeout=20
    )
    assert done.stdout.decode().split("\0")[:-1] == words


def test_the_command_line_has_no_characters_that_are_special_in_a_shell() -> None:
    line = remote_command(["python3", "-c", "\n".join(WORDS)], "mark")
    assert line.startswith('exec /bin/sh -c \'eval "$(printf %b "')
    assert line.count("'") == 2
    assert not set(line) & set("!\n`")


def test_a_mark_is_printed_with_the_process_id() -> None:
    script = "echo $$"
    done = subprocess.run(
        ["sh", "-c", remote_command(["sh", "-c", script], "mark")], capture_output=True, check=True, timeout=20
    )
    assert done.stderr == b"mark " + done.stdout
