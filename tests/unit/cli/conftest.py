"""The fixture ``screen``: its own state directory, and the time zone UTC."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from distflow.state.directory import find_state_directory
from unit.cli.screen import Screen


@pytest.fixture
def screen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Screen]:
    """Return a screen on an empty state directory."""
    monkeypatch.setenv("DISTFLOW_STATE", str(tmp_path / "state"))
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    made = Screen(find_state_directory(os.environ).ensure(), capsys)
    yield made
    made.client.close()
    made.store.close()
