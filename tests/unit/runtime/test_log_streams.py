from __future__ import annotations

from typing import TYPE_CHECKING, Any

from distflow.runtime.agent.log_streams import LogStreams

if TYPE_CHECKING:
    from pathlib import Path


def test_a_file_that_cannot_be_read_ends_only_its_stream(tmp_path: Path) -> None:
    (tmp_path / "output.log").mkdir()  # it can be opened, and reading it fails, as on a disk with an error
    pushed: list[dict[str, Any]] = []
    streams = LogStreams(pushed.append, lambda: True)
    streams.add(1, "a", str(tmp_path), "output.log", 0, has_ended=False)
    streams.on_output("a", has_ended=False)
    assert pushed == []
    streams.on_output("a", has_ended=True)
    assert [(event["event"], event["stream"]) for event in pushed] == [("eof", 1)]
