"""Background copies: the attempts that get them, the times at which they are made, and their errors."""

from __future__ import annotations

import io
import itertools
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from distflow.client.rsync import copies, daemon
from distflow.client.rsync.daemon import CopySchedule, Daemon, take_snapshot
from distflow.errors import StateError
from distflow.lifecycle.states import Reason, State, WorkflowState
from distflow.state.codec import encode
from distflow.state.directory import StateDirectory
from distflow.state.store import Store
from distflow.state.syncs import Sync, Syncs
from distflow.structs import replace
from unit.state.stored import completed_group, running_group, submit, task, workflow


@pytest.mark.parametrize("is_smaller", [False, True], ids=["whole", "smaller"])
def test_a_task_that_ended_before_its_gang_gets_copies_again_in_its_next_attempt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_smaller: bool
) -> None:
    directory = StateDirectory(tmp_path).ensure()
    running, failed = running_group(), task("worker", State.FAILED, reason=Reason.EXIT_CODE)
    next_attempt = replace(running, attempt=2, tasks=tuple(replace(one, attempt=2) for one in running.tasks))
    smaller_attempt = replace(next_attempt, attempt=1, tasks=(task("master", State.RUNNING, attempt=1),), left_out=("worker",))
    states = [
        replace(running, state=State.STOPPING, tasks=(task("master", State.STOPPING), failed)),
        *([smaller_attempt] if is_smaller else []),
        next_attempt,
        completed_group(),
    ]
    with Store(directory.store) as store:
        record = submit(store, workflow([running], state=WorkflowState.RUNNING))

    @contextmanager
    def store_with_next_state(*given: Any, **named: Any) -> Iterator[Store]:
        with Store(*given, **named) as store:
            store.save([replace(record, groups=(states.pop(0),))], [])
            yield store

    copied: list[int] = []
    monkeypatch.setattr(daemon, "Store", store_with_next_state)
    monkeypatch.setattr(Daemon, "_copy", lambda _: copied.append(len(states)))
    syncs = Syncs(directory.syncs)
    syncs.ensure()
    sync = Sync(
        workflow=record.uuid, workflow_id=record.id, task="worker", local=str(tmp_path / "src"), remote="src", poll_s=0.01,
        debounce_s=0.01, reconcile_s=60, max_log_size=1 << 20,
    )  # fmt: skip
    assert Daemon(directory, syncs, sync).work() == "worker has ended: COMPLETED"
    assert copied == [1]


@pytest.mark.parametrize("unusable", [None, "u-worker.lock", "u-worker.log"])
def test_a_file_that_cannot_be_opened_is_an_error_in_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], unusable: str | None
) -> None:
    if unusable:
        (StateDirectory(tmp_path).syncs / unusable).mkdir(parents=True)
    sync = Sync(
        workflow="u", workflow_id="digits-1", task="worker", local="/src", remote="src", poll_s=1, debounce_s=1, reconcile_s=60,
        max_log_size=1,
    )  # fmt: skip
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(encode(sync))))
    before = signal.getsignal(signal.SIGTERM)
    try:
        assert daemon.main([str(tmp_path), "1"]) == StateError.exit_code
    finally:
        signal.signal(signal.SIGTERM, before)
    assert capsys.readouterr().err.startswith("error: cannot use the state directory: ")


def test_a_log_that_cannot_be_opened_is_an_error_of_the_state_directory(tmp_path: Path) -> None:
    ready, answer_to = os.pipe()
    with pytest.raises(StateError, match=f"cannot use the state directory: {tmp_path}: Is a directory"):
        copies._launch(StateDirectory(tmp_path), tmp_path, answer_to)
    assert os.read(ready, 1) == b""  # the other end is closed
    os.close(ready)


def test_every_kind_of_change_is_detected(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "one").write_text("1")
    (tmp_path / "link").symlink_to(tmp_path)
    initial = take_snapshot(str(tmp_path))
    assert take_snapshot(str(tmp_path)) == initial
    assert {os.path.relpath(path, tmp_path) for path in initial} == {".", "sub", "sub/one", "link"}
    (tmp_path / "sub" / "one").write_text("12")
    grown = take_snapshot(str(tmp_path))
    (tmp_path / "sub" / "one").chmod(0o700)
    executable = take_snapshot(str(tmp_path))
    (tmp_path / "two").write_text("")
    added = take_snapshot(str(tmp_path))
    (tmp_path / "sub" / "one").unlink()
    removed = take_snapshot(str(tmp_path))
    snapshots = [initial, grown, executable, added, removed]
    assert all(before != after for before, after in itertools.pairwise(snapshots))
    assert list(take_snapshot(str(tmp_path / "two"))) == [str(tmp_path / "two")]
    assert take_snapshot(str(tmp_path / "none")) == {}


def test_a_copy_is_due_at_the_start_after_changes_settle_and_at_intervals() -> None:
    schedule = CopySchedule(debounce_s=3, reconcile_s=100)
    schedule.add_snapshot({"file": (0, 0, 0)}, 0)
    assert schedule.is_due(0)
    schedule.record_copy(0)
    due = []
    for now in range(1, 220):
        # The file changes at 10 and 11, and at every scan from 150 on.
        schedule.add_snapshot({"file": (0, 0 if now < 10 else 1 if now < 11 else 2 if now < 150 else now, 0)}, now)
        if schedule.is_due(now):
            due.append(now)
            schedule.record_copy(now)
    # 3 s after the change at 11, 100 s after that, and another 100 s later, because the changes never settle.
    assert due == [14, 114, 214]
    schedule.forget_copies()
    assert schedule.is_due(214)
