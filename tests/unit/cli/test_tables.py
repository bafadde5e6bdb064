"""Tables, colors, the width of terminals, and formats of times."""

from __future__ import annotations

import io

import pytest

from distflow.cli.render.tables import Paint, cut, table, terminal_width, visible_width
from distflow.documents.quantities import duration_hms, iso, local_minute, local_second
from distflow.documents.text import plain
from unit.cli.screen import Terminal
from unit.state.stored import T0


def test_columns_are_aligned_with_colors_and_wide_characters() -> None:
    paint = Paint(enabled=True)
    text = "a.yaml:3: error: no name\n    hint: error: x\nwarning: slow\nan error: y"
    assert paint.messages(text) == (
        "a.yaml:3: \x1b[31merror\x1b[0m: no name\n    hint: error: x\n\x1b[33mwarning\x1b[0m: slow\nan error: y"
    )
    assert Paint().messages(text) == text
    text = table(("Name", "Status", "Line"), [("日本", paint.status("RUNNING"), "x"), ("ab", "", "y")])
    lines = [plain(line) for line in text.splitlines()]
    assert lines == ["Name  Status   Line", "===================", "日本  RUNNING  x", "ab    -        y"]


def test_only_the_last_column_is_cut() -> None:
    text = table(("Task", "Last log line"), [("worker", "日本日本日本日本日本")], width=24)
    assert text.splitlines()[-1] == "worker  日本日本日本日…"
    assert max(map(visible_width, text.splitlines())) <= 24


def test_text_of_tasks_cannot_disturb_a_terminal() -> None:
    assert plain("\x1b[2J\x1b]0;title\x07a\tb\x9bc\x00") == "a b c "
    assert cut("\x1b[31mred\x1b[0m", 3) == "\x1b[31mred\x1b[0m"
    assert cut("\x1b[31mreddish\x1b[0m", 4) == "red…"


def test_colors_are_only_for_terminals_that_allow_them() -> None:
    assert Paint.of(Terminal(), {}).enabled
    assert not Paint.of(Terminal(), {"NO_COLOR": "1"}).enabled
    assert not Paint.of(Terminal(), {"TERM": "dumb"}).enabled
    assert not Paint.of(io.StringIO(), {}).enabled


def test_only_terminals_have_a_width(monkeypatch: pytest.MonkeyPatch) -> None:
    assert terminal_width(io.StringIO()) is None
    monkeypatch.setenv("COLUMNS", "77")
    assert terminal_width(Terminal()) == 77
    monkeypatch.setenv("COLUMNS", "wide")
    assert terminal_width(Terminal()) == 80


@pytest.mark.usefixtures("screen")
def test_times_have_formats_for_text_and_json() -> None:
    assert local_minute(T0) == "Apr 11, 2025 21:31 UTC"
    assert local_second(T0) == "2025/04/11 21:31:07"
    assert iso(T0 + 0.25) == "2025-04-11T21:31:07.250"
    assert (local_minute(None), iso(None), duration_hms(None)) == ("-", None, "-")
    assert len(local_second(None)) == len(local_second(T0))
    assert [duration_hms(value) for value in (0, 59.9, 61, 3600, 86400 * 2 + 5, -3)] == [
        "0:00", "0:59", "1:01", "1:00:00", "2d 0:00:05", "0:00",
    ]  # fmt: skip
