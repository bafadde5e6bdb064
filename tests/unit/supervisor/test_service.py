"""The supervisor's process: its start, its lock, its wake-up, and its end."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import distflow
from distflow.errors import StateError, StoreTooNew, SupervisorError
from distflow.state.directory import StateDirectory
from distflow.state.store import Store
from distflow.supervisor.process import (
    SupervisorLock,
    ensure_supervisor,
    is_running,
    open_wake_socket,
    preload_supervisor,
    stop_outdated_supervisor,
    wake,
)
from distflow.supervisor.service import _await_room, _serve, _Starter
from unit.state.stored import running_group, submit, workflow


def test_supervisor_ends_when_only_unreadable_workflows_remain(tmp_path: Path) -> None:
    directory = StateDirectory(tmp_path / "state").ensure()
    with Store(directory.store) as store:
        submit(store, workflow([running_group()]))
        store._db.execute("UPDATE groups SET record = ?", (b'{"name": 3}',))
    read_end, write_end = os.pipe()
    lock = SupervisorLock(directory)
    assert lock.take()
    assert _serve(directory, _Starter(write_end), lock)
    assert os.read(read_end, 64) == b"ready"
    os.close(read_end)


def test_supervisor_ends_although_notifications_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = StateDirectory(tmp_path).ensure()
    answers = [False]

    def has_notifications(_: Store) -> bool:
        if answers:
            return answers.pop()
        raise StateError("the disk is full")

    with Store(directory.store) as store:
        submit(store, workflow([running_group()]))
        store._db.execute("UPDATE groups SET record = ?", (b'{"name": 3}',))
    monkeypatch.setattr(Store, "has_notifications", has_notifications)
    read_end, write_end = os.pipe()
    lock = SupervisorLock(directory)
    assert lock.take()
    assert _serve(directory, _Starter(write_end), lock)
    os.close(read_end)


def test_removed_state_directory_is_logged_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    gone = tmp_path / "gone"
    command = [sys.executable, "-m", "distflow.supervisor", str(gone), "1"]
    environment = {**os.environ, "PYTHONPATH": str(Path(distflow.__file__).parents[1])}
    ended = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert ended.returncode == 1
    assert f" cannot continue: cannot use the state directory: {gone}/blobs: No such file or directory; " in ended.stderr
    assert not _await_room(StateDirectory(gone))
    logged = capsys.readouterr().err
    assert f" cannot check the free space: cannot use the state directory: {gone}: No such file or directory; " in logged
    assert (ended.stderr + logged).count("\n") == 2


def test_a_lock_holds_although_its_file_was_removed(tmp_path: Path) -> None:
    directory = StateDirectory(tmp_path).ensure()
    first, second = SupervisorLock(directory), SupervisorLock(directory)
    assert first.take()
    directory.lock.unlink()
    assert is_running(directory)
    assert not second.take()
    assert not directory.lock.exists()
    first.release()
    assert not is_running(directory)
    assert second.take()
    second.release()


def test_lock_of_an_older_version_which_locks_only_the_file_is_respected(tmp_path: Path) -> None:
    directory = StateDirectory(tmp_path).ensure()
    with directory.lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        lock = SupervisorLock(directory)
        assert is_running(directory)
        assert not lock.take()
    assert lock.take()
    lock.release()


_HOLDER = """
import fcntl, os, sys
for path in sys.argv[1:3]:
    fcntl.flock(os.open(path, os.O_RDONLY), fcntl.LOCK_EX)
print(flush=True)
sys.stdin.read()
"""


@contextmanager
def lock_holder(directory: StateDirectory, version: str, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    """Yield a process that has the supervisor's lock, and whose lock file has this version."""
    directory.lock.touch()
    command = [sys.executable, "-c", _HOLDER, str(directory.blobs), str(directory.lock), *arguments]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline()
        directory.lock.write_text(f"{process.pid}\n{version}")
        yield process
        process.terminate()


@pytest.mark.parametrize(("version", "name"), [("", "0.2.0 or older"), ("0.1.9 7\n", "0.1.9")])
def test_a_supervisor_of_an_older_version_is_stopped(tmp_path: Path, version: str, name: str) -> None:
    directory = StateDirectory(tmp_path).ensure()
    assert stop_outdated_supervisor(directory) is None
    with lock_holder(directory, version, "distflow.supervisor") as process:
        assert stop_outdated_supervisor(directory) == name
        assert process.wait(20) == -signal.SIGTERM
    assert not is_running(directory)


def test_a_supervisor_of_this_or_a_newer_version_continues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = StateDirectory(tmp_path).ensure()
    with lock_holder(directory, "999.0 999\n", "distflow.supervisor") as process:
        assert stop_outdated_supervisor(directory) is None
        assert process.poll() is None
    lock = SupervisorLock(directory)
    assert lock.take()
    monkeypatch.setattr(
        "distflow.supervisor.process._is_supervisor",
        lambda _: pytest.fail("a supervisor of this version was taken for an outdated one"),
    )
    assert stop_outdated_supervisor(directory) is None
    directory.lock.unlink()
    monkeypatch.setattr("distflow.supervisor.process._END_TIMEOUT_S", 0.0)
    assert stop_outdated_supervisor(directory) is None
    lock.release()


def test_a_lock_holder_that_is_not_a_supervisor_is_not_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("distflow.supervisor.process._END_TIMEOUT_S", 0.1)
    directory = StateDirectory(tmp_path).ensure()
    with lock_holder(directory, "") as process:
        with pytest.raises(SupervisorError, match=r"the workflow was not stored, .* of this version\n.*pkill -KILL -f"):
            stop_outdated_supervisor(directory)
        assert process.poll() is None


@pytest.mark.parametrize("start", [preload_supervisor, ensure_supervisor])
def test_a_supervisor_that_cannot_be_started_is_an_error_with_a_hint(
    tmp_path: Path, start: Callable[[StateDirectory], object]
) -> None:
    directory = StateDirectory(tmp_path).ensure()
    directory.supervisor_log.mkdir()
    with pytest.raises(SupervisorError, match=r"the supervisor cannot be started: .*Is a directory") as caught:
        start(directory)
    assert f"the permissions of {directory.path}" in caught.value.hint


def test_reading_a_store_that_a_newer_version_has_upgraded_raises_store_too_new(tmp_path: Path) -> None:
    directory = StateDirectory(tmp_path).ensure()
    with Store(directory.store) as store, Store(directory.store) as newer:
        assert store.has_news()
        newer._db.execute("PRAGMA user_version = 99")
        with pytest.raises(StoreTooNew):
            store.has_news()


def test_wake_up_with_a_long_state_path_does_not_depend_on_the_temporary_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    shared = tmp_path / f"distflow-{os.getuid()}"
    shared.mkdir()
    shared.chmod(0o777)
    # The path is longer than the address of a socket may be.
    directory = StateDirectory(tmp_path / ("x" * 200)).ensure()
    wake_socket = open_wake_socket(directory)
    assert wake_socket is not None
    wake_socket.settimeout(20)
    wake(directory)
    assert wake_socket.recv(16) == b"wake"
    wake_socket.close()


def test_supervisor_works_without_a_wake_socket(tmp_path: Path) -> None:
    directory = StateDirectory(tmp_path).ensure()
    directory.socket.mkdir()
    assert open_wake_socket(directory) is None
    wake(directory)
    read_end, write_end = os.pipe()
    with Store(directory.store) as store:
        submit(store, workflow([running_group()]))
        store._db.execute("UPDATE groups SET record = ?", (b'{"name": 3}',))
    lock = SupervisorLock(directory)
    assert lock.take()
    assert _serve(directory, _Starter(write_end), lock)
    os.close(read_end)
