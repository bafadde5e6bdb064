"""Progress lines on terminals and pipes."""

from __future__ import annotations

import io

import pytest

from distflow.cli.render import terminal
from distflow.cli.render.terminal import ProgressLine
from unit.cli.screen import Terminal


def test_a_terminal_shows_the_progress_and_is_cleared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(terminal, "_EVERY_S", 0.0)
    screen = Terminal()
    with ProgressLine(screen, "sent") as line:
        line.update(1 << 20, 4 << 20)
        assert "sent 1.0 MiB of 4.0 MiB, " in screen.getvalue()
    assert screen.getvalue().endswith("\r\x1b[K")
    before = screen.getvalue()
    line.update(2 << 20, 4 << 20)  # a thread may call this after the end
    assert screen.getvalue() == before


def test_a_pipe_gets_a_line_every_few_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = io.StringIO()
    with ProgressLine(pipe, "sent") as line:
        line.update(1, 2)
        assert pipe.getvalue() == ""
        monkeypatch.setattr(terminal, "_LINE_EVERY_S", 0.0)
        line.update(1 << 20, 4 << 20)
        line.update(4 << 20, 4 << 20)
    first, second = pipe.getvalue().splitlines()
    assert first.startswith("sent 1.0 MiB of 4.0 MiB, ")
    assert first.endswith(" left")
    assert second.startswith("sent 4.0 MiB of 4.0 MiB, ")
    assert "left" not in second
