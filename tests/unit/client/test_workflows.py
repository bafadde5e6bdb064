"""Waiting for workflows, and running commands alongside their tasks, without nodes."""

from __future__ import annotations

import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from distflow.client import running_tasks, workflows
from distflow.client.client import Client
from distflow.client.running_tasks import CommandsEnded, Exit, _check_attempt, _connections, _listen, run_on_tasks
from distflow.client.workflows import outputs_until, wait
from distflow.errors import InputError
from distflow.lifecycle.states import WorkflowState
from distflow.state.directory import StateDirectory
from distflow.state.ends import End
from distflow.state.store import Store
from distflow.structs import replace
from unit.state.stored import T0, running_group, submit, workflow


@pytest.mark.parametrize("key", ["digits", "-"])
def test_waiting_by_name_does_not_switch_to_a_newer_run(key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(StateDirectory(tmp_path).ensure().store)
    first = submit(store, workflow(state=WorkflowState.RUNNING))

    def submit_another(_: float) -> None:
        monkeypatch.setattr(workflows, "pause", lambda _: pytest.fail("the wait continues after the end of its workflow"))
        submit(store, workflow(state=WorkflowState.RUNNING, number=2, at=T0 + 60))
        store.save([replace(first, state=WorkflowState.COMPLETED, ended_at=T0 + 90)], [])

    monkeypatch.setattr(workflows, "pause", submit_another)
    with Client(environ={"DISTFLOW_STATE": str(tmp_path)}) as client:
        assert [one.id for one in wait(client, [key])] == ["digits-1"]
    store.close()


def test_supervisors_that_end_again_and_again_are_reported_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Store(StateDirectory(tmp_path).ensure().store) as store:
        submit(store, workflow(state=WorkflowState.RUNNING))
    monkeypatch.setattr(sys, "executable", "/bin/false")
    notes: list[str] = []
    with Client(environ={"DISTFLOW_STATE": str(tmp_path)}, notify=notes.append) as client:
        for _ in range(2):
            client.wake()
        assert notes == []
        for _ in range(5):
            client.wake()
    (note,) = notes
    assert note.startswith("warning: supervisors end again and again (3 were started); running tasks continue, but nothing")
    assert note.endswith(f"See the last error in {tmp_path}/supervisor.log")


@pytest.mark.parametrize("step", ["is_running", "_trim"])
def test_a_supervisor_that_cannot_be_started_is_only_a_warning(
    step: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A command that reads the store works although the lock or the log of the supervisor cannot be opened."""

    def refuse(_: object) -> None:
        raise PermissionError(13, "Permission denied", "supervisor.file")

    with Store(StateDirectory(tmp_path).ensure().store) as store:
        submit(store, workflow(state=WorkflowState.RUNNING))
    monkeypatch.setattr(f"distflow.supervisor.process.{step}", refuse)
    notes: list[str] = []
    with Client(environ={"DISTFLOW_STATE": str(tmp_path)}, notify=notes.append) as client:
        client.wake()
    (note,) = notes
    assert note.startswith("warning: the supervisor cannot be started: ")
    assert "Permission denied" in note


@pytest.mark.parametrize(("backend", "kept_s"), [("ssh", 14 * 86400), ("slurm", 14 * 86400), ("kubernetes", None)])
def test_files_that_end_with_their_nodes_have_no_retention_time(backend: str, kept_s: int | None, tmp_path: Path) -> None:
    store = Store(StateDirectory(tmp_path).ensure().store)
    group = running_group()
    tasks = tuple(replace(one, output_dir="/r/output") for one in group.tasks)
    record = submit(store, workflow([replace(group, tasks=tasks)]), backend=backend)
    store.close()
    with Client(environ={"DISTFLOW_STATE": str(tmp_path)}) as client:
        until = outputs_until(client, record)
        first = replace(tasks[0], end=End(ended_at=T0 + 5, exit_code=0))
        earlier = outputs_until(client, replace(record, groups=(replace(group, tasks=(first, *tasks[1:])),)))
    assert until is None if kept_s is None else until == (record.ended_at or 0) + kept_s
    # `node clean` may remove the files of the first task while the workflow still runs.
    assert earlier is None if kept_s is None else earlier == T0 + 5 + kept_s


@pytest.mark.parametrize("changed", [{"node": "other-node"}, {"attempt": 1}])
def test_ports_are_not_forwarded_to_an_earlier_attempt(changed: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    group = running_group()
    first = group.tasks[0]
    newer = replace(group, tasks=(replace(first, **changed), *group.tasks[1:]))
    _check_attempt(workflow([group], state=WorkflowState.RUNNING), first)
    monkeypatch.setattr(running_tasks, "_CHECK_EVERY_S", 0.0)  # so that each connection is late enough for a check
    with _listen("localhost", 0) as listener, socket.create_connection(listener.getsockname()[:2]):
        record = workflow([newer], state=WorkflowState.RUNNING)
        with pytest.raises(InputError, match=f"a new one runs on {newer.tasks[0].node}"):
            next(_connections([listener], lambda: _check_attempt(record, first)))


class EndedCommand:
    """A running task whose command has ended. It is also the session of the command."""

    def __init__(self, code: int) -> None:
        self.code = code

    def open(self, *_: object) -> EndedCommand:
        return self

    def end_input(self) -> None:
        pass

    def events(self) -> Iterator[Exit]:
        yield Exit(code=self.code)

    def close(self) -> None:
        pass


@pytest.mark.parametrize(("code", "reported"), [(0, 1), (3, 3)])
def test_a_command_whose_end_cannot_be_shown_has_a_nonzero_exit_code(code: int, reported: int) -> None:
    def on_exit(_: int, end: Exit) -> None:
        raise BrokenPipeError

    task: Any = EndedCommand(code)
    ended = run_on_tasks([task], ["true"], 10, on_output=lambda *_: None, on_exit=on_exit)
    assert ended == CommandsEnded(codes=(reported,), errors=())
