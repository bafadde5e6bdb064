"""Blobs that one task has as its own file while another one asks for them."""

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


def test_what_a_task_writes_to_a_blob_just_when_another_asks_for_it_is_never_taken_for_the_blob(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = b"as it was sent"
    name = hashlib.sha256(data).hexdigest()
    blob, asked = tmp_path / blobs.BLOBS / name, [{"hash": name, "size": len(data)}]
    part = blobs.Part(str(blob))
    os.write(part.fd, data)
    part.finish()
    assert blobs.missing(str(tmp_path), asked) == []

    utime = os.utime

    def utime_late(path: str, **times: Any) -> None:
        blob.write_bytes(b"what the task made of it")
        utime(path, **times)

    monkeypatch.setattr(os, "utime", utime_late)
    blobs.missing(str(tmp_path), asked)
    assert blob.read_bytes() == data or blobs.missing(str(tmp_path), asked) == [name]
    blob.write_bytes(b"what the task makes of it later")
    assert blobs.missing(str(tmp_path), asked) == [name]


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
        said: list[Any] = []
        assert receive(io.BytesIO(stream), str(path), name, len(data), said.append)
        assert path.read_bytes() == data
    assert said == [{"at": len(data)}]
    assert path.stat().st_ino in synced
