"""The state directory."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from distflow.state.directory import StateDirectory


def test_threads_may_create_the_directory_at_the_same_time(tmp_path: Path) -> None:
    directory = StateDirectory(tmp_path / "state")
    with ThreadPoolExecutor(8) as threads:
        made = list(threads.map(lambda _: directory.ensure(), range(800)))
    assert made == [directory] * 800
