"""Records and locks of the processes that copy files in the background."""

from __future__ import annotations

import fcntl
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from distflow.errors import StateError
from distflow.state.syncs import Sync, Syncs
from distflow.structs import replace
from distflow.testing.waiting import wait_until

SYNC = Sync(
    workflow="a1", workflow_id="copy-1", task="main", local="/src", remote="src", poll_s=1, debounce_s=1, reconcile_s=60,
    max_log_size=1024,
)  # fmt: skip


def create_syncs(folder: Path) -> Syncs:
    syncs = Syncs(folder / "rsync")
    syncs.ensure()
    return syncs


def test_each_task_has_one_process_and_only_the_owner_reads_its_files(tmp_path: Path) -> None:
    syncs = create_syncs(tmp_path)
    handle = syncs.take(SYNC)
    assert handle is not None
    assert syncs.take(SYNC) is None
    assert syncs.is_running(SYNC)
    other = syncs.take(replace(SYNC, task="helper"))
    assert other is not None
    os.close(other)
    syncs.write(SYNC)
    os.close(handle)
    assert not syncs.is_running(SYNC)
    assert not syncs.is_running(replace(SYNC, task="never"))
    assert syncs.list() == [SYNC]
    modes = {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "rsync").iterdir()}
    assert (modes, stat.S_IMODE((tmp_path / "rsync").stat().st_mode)) == ({0o600}, 0o700)


def test_checking_the_lock_does_not_prevent_taking_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    syncs = create_syncs(tmp_path)
    reader = os.open(tmp_path / "rsync" / "a1-main.lock", os.O_RDWR | os.O_CREAT, 0o600)
    flock = fcntl.flock
    flock(reader, fcntl.LOCK_SH)

    def refused_once(handle: int, how: int) -> None:
        try:
            flock(handle, how)
        except BlockingIOError:
            flock(reader, fcntl.LOCK_UN)  # the reader has checked the lock
            raise

    monkeypatch.setattr(fcntl, "flock", refused_once)
    handle = syncs.take(SYNC)
    assert handle is not None
    os.close(handle)
    os.close(reader)


def test_damaged_records_are_skipped_and_old_ones_are_removed(tmp_path: Path) -> None:
    syncs = create_syncs(tmp_path)
    syncs.write(replace(SYNC, ended_at=1000.0))
    syncs.write(replace(SYNC, task="helper"))
    (tmp_path / "rsync" / "a1-bad.json").write_text("{")
    syncs.forget(1000.0 + 13 * 86400)
    assert [one.task for one in syncs.list()] == ["helper", "main"]
    syncs.forget(1000.0 + 15 * 86400)
    assert [one.task for one in syncs.list()] == ["helper"]


@pytest.mark.parametrize("ignores_sigterm", [False, True])
def test_stop_ends_only_the_process_that_holds_the_lock(
    tmp_path: Path, ignores_sigterm: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("distflow.state.syncs._STOP_S", 0.3)
    syncs = create_syncs(tmp_path)
    lock = tmp_path / "rsync" / "a1-main.lock"
    # The process ignores SIGTERM before it takes the lock, so before `is_running` is true.
    code = "import fcntl, signal\n" + "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" * ignores_sigterm
    code += f"file = open({str(lock)!r}, 'w')\nfcntl.flock(file, fcntl.LOCK_EX)\nsignal.pause()"
    with subprocess.Popen([sys.executable, "-c", code]) as holder:
        wait_until(lambda: syncs.is_running(SYNC))
        syncs.write(replace(SYNC, pid=holder.pid))
        syncs.stop(SYNC)
        assert holder.wait(60) == (-9 if ignores_sigterm else -15)
    # A process without the lock is not signaled, because the recorded pid may have been reused.
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as stranger:
        syncs.write(replace(SYNC, pid=stranger.pid))
        syncs.stop(SYNC)
        assert stranger.poll() is None
        stranger.communicate(b"\n")
        assert stranger.returncode == 0


def test_a_directory_that_cannot_be_created_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "rsync").write_text("")
    with pytest.raises(StateError, match="cannot use the state directory"):
        create_syncs(tmp_path)
