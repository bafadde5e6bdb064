"""Heartbeats of a rank."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from distflow.train import heartbeat


def test_beat_touches_the_file_at_most_once_a_second(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "beat"
    monkeypatch.setattr(heartbeat, "_last", -heartbeat._EVERY_S)
    heartbeat.beat()
    assert list(tmp_path.iterdir()) == [], "touched although the variable is not set"
    monkeypatch.setenv("DISTFLOW_HEARTBEAT", str(path))
    heartbeat.beat()
    os.utime(path, (0, 0))
    heartbeat.beat()
    assert path.stat().st_mtime == 0, "touched again within a second"
    monkeypatch.setattr(heartbeat, "_last", heartbeat._last - 2 * heartbeat._EVERY_S)
    heartbeat.beat()
    assert path.stat().st_mtime > 0


def test_a_file_that_cannot_be_touched_is_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeat, "_last", -heartbeat._EVERY_S)
    monkeypatch.setenv("DISTFLOW_HEARTBEAT", str(tmp_path / "nowhere" / "beat"))
    heartbeat.beat()
