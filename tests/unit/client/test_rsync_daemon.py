"""Which of a task's attempts get the files that are copied in the background."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from distflow.client.rsync import daemon as rsync_daemon
from distflow.client.rsync.daemon import Daemon
from distflow.lifecycle.states import Reason, State, WorkflowState
from distflow.state.directory import StateDirectory
from distflow.state.store import Store
from distflow.state.syncs import Sync, Syncs
from unit.state.stored import completed_group, running_group, submit, task, workflow


@pytest.mark.parametrize("is_smaller", [False, True], ids=["whole", "smaller"])
def test_a_task_that_has_ended_before_its_gang_is_followed_to_its_next_attempt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_smaller: bool
) -> None:
    directory = StateDirectory(tmp_path).ensure()
    running, failed = running_group(), task("worker", State.FAILED, reason=Reason.EXIT_CODE)
    again = replace(running, attempt=2, tasks=tuple(replace(one, attempt=2) for one in running.tasks))
    without = replace(again, attempt=1, tasks=(task("master", State.RUNNING, attempt=1),), left_out=("worker",))
    story = [
        replace(running, state=State.STOPPING, tasks=(task("master", State.STOPPING), failed)),
        *([without] if is_smaller else []),
        again,
        completed_group(),
    ]
    with Store(directory.store) as store:
        record = submit(store, workflow([running], state=WorkflowState.RUNNING))

    @contextmanager
    def and_it_goes_on(*given: Any, **named: Any) -> Iterator[Store]:
        with Store(*given, **named) as store:
            store.save([replace(record, groups=(story.pop(0),))], [])
            yield store

    copied: list[int] = []
    monkeypatch.setattr(rsync_daemon, "Store", and_it_goes_on)
    monkeypatch.setattr(Daemon, "_copy", lambda _: copied.append(len(story)))
    syncs = Syncs(directory.syncs)
    syncs.ensure()
    sync = Sync(
        workflow=record.uuid, workflow_id=record.id, task="worker", local=str(tmp_path / "src"), remote="src", poll_s=0.01,
        debounce_s=0.01, reconcile_s=60, max_log_size=1 << 20,
    )  # fmt: skip
    assert Daemon(directory, syncs, sync).work() == "worker has ended: COMPLETED"
    assert copied == [1]
