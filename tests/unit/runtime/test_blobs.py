"""Blobs of a node: changed and truncated ones are not reused."""

from __future__ import annotations

import hashlib
import io
import os
from typing import TYPE_CHECKING, Any

from distflow.runtime.files import blobs
from distflow.runtime.services.frames import frames, receive

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


def test_a_blob_that_a_task_changes_during_a_request_is_reported_as_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = b"as it was sent"
    name = hashlib.sha256(data).hexdigest()
    blob, request = tmp_path / blobs.BLOBS / name, [{"hash": name, "size": len(data)}]
    part = blobs.Part(str(blob))
    os.write(part.fd, data)
    part.finish()
    assert blobs.missing(str(tmp_path), request) == []

    utime = os.utime

    def utime_after_change(path: str, **times: Any) -> None:
        blob.write_bytes(b"changed by the task")
        utime(path, **times)

    monkeypatch.setattr(os, "utime", utime_after_change)
    blobs.missing(str(tmp_path), request)
    assert blob.read_bytes() == data or blobs.missing(str(tmp_path), request) == [name]
    blob.write_bytes(b"changed by the task later")
    assert blobs.missing(str(tmp_path), request) == [name]


def test_a_fetched_blob_that_a_power_cut_shortened_is_fetched_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = b"checkpoint" * 100
    name = hashlib.sha256(data).hexdigest()
    path = tmp_path / name
    path.write_bytes(data[:10])
    synced: list[int] = []
    fsync = os.fsync

    def sync(fd: int) -> None:
        synced.append(os.fstat(fd).st_ino)
        fsync(fd)

    monkeypatch.setattr(os, "fsync", sync)
    stream = b"".join(frame for _, frame in frames(io.BytesIO(data)))
    for _ in range(2):
        sent: list[Any] = []
        assert receive(io.BytesIO(stream), str(path), name, len(data), sent.append)
        assert path.read_bytes() == data
    assert sent == [{"at": len(data)}]
    assert path.stat().st_ino in synced
