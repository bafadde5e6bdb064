"""The background process: when it is at work, and when it ends."""

from __future__ import annotations

import fcntl
import os
import tempfile
from pathlib import Path

import pytest

from distflow.state.directory import StateDirectory
from distflow.state.store import Store
from distflow.supervisor.process import Lock, is_running, open_wake_socket, wake
from distflow.supervisor.service import _serve, _Starter
from unit.state.stored import running_group, submit, workflow


def test_it_ends_when_only_workflows_are_left_that_it_cannot_read(tmp_path: Path) -> None:
    directory = StateDirectory(tmp_path / "state").ensure()
    with Store(directory.store) as store:
        submit(store, workflow([running_group()]))
        store._db.execute("UPDATE groups SET record = ?", (b'{"name": 3}',))
    told, tell = os.pipe()
    lock = Lock(directory)
    assert lock.take()
    assert _serve(directory, _Starter(tell), lock)
    assert os.read(told, 64) == b"ready"
    os.close(told)


def test_a_lock_holds_although_its_file_was_removed(tmp_path: Path) -> None:
    directory = StateDirectory(tmp_path).ensure()
    first, second = Lock(directory), Lock(directory)
    assert first.take()
    directory.lock.unlink()
    assert is_running(directory)
    assert not second.take()
    assert not directory.lock.exists()
    first.give_up()
    assert not is_running(directory)
    assert second.take()
    second.give_up()


def test_a_supervisor_of_an_earlier_version_holds_the_file_alone(tmp_path: Path) -> None:
    directory = StateDirectory(tmp_path).ensure()
    with directory.lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        lock = Lock(directory)
        assert is_running(directory)
        assert not lock.take()
    assert lock.take()
    lock.give_up()


def test_another_users_directory_keeps_nobody_from_being_woken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    trap = tmp_path / f"distflow-{os.getuid()}"
    trap.mkdir()
    trap.chmod(0o777)
    # Longer than the address of a socket may be.
    directory = StateDirectory(tmp_path / ("x" * 200)).ensure()
    knock = open_wake_socket(directory)
    assert knock is not None
    knock.settimeout(20)
    wake(directory)
    assert knock.recv(16) == b"wake"
    knock.close()


def test_a_state_directory_without_sockets_is_no_obstacle(tmp_path: Path) -> None:
    directory = StateDirectory(tmp_path).ensure()
    directory.socket.mkdir()
    assert open_wake_socket(directory) is None
    wake(directory)
    told, tell = os.pipe()
    with Store(directory.store) as store:
        submit(store, workflow([running_group()]))
        store._db.execute("UPDATE groups SET record = ?", (b'{"name": 3}',))
    lock = Lock(directory)
    assert lock.take()
    assert _serve(directory, _Starter(tell), lock)
    os.close(told)
