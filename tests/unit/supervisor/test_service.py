"""The background process: when it is at work, and when it ends."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from distflow.state.directory import StateDirectory
from distflow.state.store import Store
from distflow.supervisor.process import Lock
from distflow.supervisor.service import _serve, _Starter
from unit.state.stored import running_group, submit, workflow


def test_it_ends_when_only_workflows_are_left_that_it_cannot_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    directory = StateDirectory(tmp_path / "state").ensure()
    with Store(directory.store) as store:
        submit(store, workflow([running_group()]))
        store._db.execute("UPDATE groups SET record = ?", (b'{"name": 3}',))
    told, tell = os.pipe()
    lock = Lock(directory.lock)
    assert lock.take()
    assert _serve(directory, _Starter(tell), lock)
    assert os.read(told, 64) == b"ready"
    os.close(told)
