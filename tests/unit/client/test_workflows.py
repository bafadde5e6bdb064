"""Waiting for workflows, without nodes."""

from __future__ import annotations

from pathlib import Path

import pytest

from distflow.client import workflows
from distflow.client.client import Client
from distflow.client.workflows import wait
from distflow.lifecycle.states import WorkflowState
from distflow.state.directory import StateDirectory
from distflow.state.store import Store
from distflow.structs import replace
from unit.state.stored import T0, submit, workflow


@pytest.mark.parametrize("key", ["digits", "-"])
def test_waiting_by_name_does_not_switch_to_a_newer_run(key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(StateDirectory(tmp_path).ensure().store)
    first = submit(store, workflow(state=WorkflowState.RUNNING))

    def submit_another(_: float) -> None:
        monkeypatch.setattr(workflows, "pause", lambda _: pytest.fail("the wait goes on after the end of its workflow"))
        submit(store, workflow(state=WorkflowState.RUNNING, number=2, at=T0 + 60))
        store.save([replace(first, state=WorkflowState.COMPLETED, ended_at=T0 + 90)], [])

    monkeypatch.setattr(workflows, "pause", submit_another)
    with Client(environ={"DISTFLOW_STATE": str(tmp_path)}) as client:
        assert [one.id for one in wait(client, [key])] == ["digits-1"]
    store.close()
