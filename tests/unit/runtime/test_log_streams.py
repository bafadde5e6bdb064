"""The streams of log files that an agent sends, if a file cannot be read."""

from __future__ import annotations

import base64
import os
import time
from typing import TYPE_CHECKING, Any

from distflow.runtime.agent.log_streams import LogStreams

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


def test_a_file_that_cannot_be_read_ends_its_stream_after_30_s(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "output.log").mkdir()  # it can be opened, and reading it fails, as on a disk with an error
    pushed: list[dict[str, Any]] = []
    streams = LogStreams(pushed.append, lambda: True)
    streams.add(1, "a", str(tmp_path), "output.log", 0, has_ended=False)
    streams.on_output("a", has_ended=False)
    assert pushed == []
    streams.on_output("a", has_ended=True)
    assert pushed == []
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now + 31.0)
    streams.pump()
    assert [(event["event"], event["stream"]) for event in pushed] == [("eof", 1)]


def test_output_of_an_ended_attempt_is_sent_when_the_disk_can_be_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "output.log").write_bytes(b"whole")
    pushed: list[dict[str, Any]] = []
    streams = LogStreams(pushed.append, lambda: True)

    def fail(*_: Any) -> bytes:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patched:
        patched.setattr(os, "pread", fail)
        streams.add(1, "a", str(tmp_path), "output.log", 0, has_ended=True)
        assert pushed == []
    streams.pump()
    assert [event["event"] for event in pushed] == ["data", "eof"]
    assert base64.b64decode(pushed[0]["data"]) == b"whole"
    assert pushed[1]["size"] == 5
