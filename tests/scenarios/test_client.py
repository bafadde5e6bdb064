"""The functions of ``distflow.client``, as a program calls them, with real processes on this machine."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from distflow.client import (
    Client,
    SubmitRequest,
    cancel,
    choose_tasks,
    explain_failures,
    fetch_output_files,
    find_workflow,
    list_output_files,
    list_workflows,
    plan,
    plan_restart,
    read_events,
    restart,
    stream_logs,
    submit,
    wait,
)
from distflow.client.specs import Overrides
from distflow.documents.problems import ProblemsFound
from distflow.errors import InputError, NotFound, StorageError, WaitTimeout
from distflow.lifecycle.states import WorkflowState
from distflow.shell import Secret
from distflow.state.record import Priority
from distflow.state.search import Search
from distflow.structs import replace
from scenarios.conftest import Cli

COUNTS = """
workflow:
  name: counts
  tasks:
  - {name: one, command: [sh, -c, "for n in 1 2 3; do echo line $n; done; echo $GREETING"]}
"""
SLEEPS = """
workflow:
  name: sleeps
  tasks:
  - {name: one, command: [sh, -c, "echo here; exec sleep 600"]}
"""
FAILS = """
workflow:
  name: fails
  tasks:
  - {name: one, command: [sh, -c, "echo broken >&2; exit 7"]}
"""
WRITES = """
workflow:
  name: writes
  groups:
  - name: both
    tasks:
    - name: one
      lead: true
      # The end of the lead stops the other task, so the lead waits for the other task's file.
      command:
      - sh
      - -c
      - |
        mkdir {{output}}/logs; echo 1 > {{output}}/logs/a.txt; echo m > {{output}}/model.pt; echo w > here
        until [ -s {{output}}/../../../two/0/output/b.txt ]; do sleep 0.05; done
    - {name: two, command: [sh, -c, "echo 2 > {{output}}/b.txt; exec sleep 600"]}
  - {name: later, tasks: [{name: three, command: ["true"], inputs: [{task: one}]}]}
"""


@pytest.fixture
def client(cli: Cli, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Iterator[Client]:
    """A client with the directories of ``cli``. It must not print anything."""
    for name in ("DISTFLOW_STATE", "DISTFLOW_CONFIG", "HOME"):
        monkeypatch.setenv(name, cli.environment[name])
    monkeypatch.chdir(cli.folder)
    with Client() as made:
        yield made
    assert capfd.readouterr() == ("", "")


def test_a_workflow_is_submitted_followed_and_waited_for(cli: Cli, client: Client) -> None:
    stored: list[str] = []
    request = SubmitRequest(
        spec=cli.spec(COUNTS), overrides=Overrides(secrets={"GREETING": Secret("hello")}), labels={"team": "vision"}
    )
    planned = plan(client, request)
    assert planned.placement == {"one": "local"}
    record = submit(client, planned, on_stored=lambda one: stored.append(one.id))
    assert stored == [record.id] == ["counts-1"]
    lines = stream_logs(client, record, choose_tasks(record, ()), follow=True)
    assert [line.text for line in lines] == ["line 1", "line 2", "line 3", "********"], "values of secrets are masked"
    assert list(lines.remarks()) == []
    (final,) = wait(client, [record.id], timeout_s=60)
    assert final.state is WorkflowState.COMPLETED
    kinds = [event.kind for event in read_events(client, final, follow=True)]
    assert kinds[0] == "submitted"
    found = list_workflows(client, Search(labels=[("team", "vision")]))
    with pytest.raises(InputError, match="the pattern `a b` for the label `team` is not valid"):
        list_workflows(client, Search(labels=[("team", "a b")]))
    assert [(one.id, one.priority) for one in found] == [("counts-1", Priority.NORMAL)]


def test_a_running_workflow_is_canceled(cli: Cli, client: Client) -> None:
    record = submit(client, plan(client, SubmitRequest(spec="-", text=SLEEPS)))
    lines = iter(stream_logs(client, record, choose_tasks(record, ()), follow=True))
    assert next(lines).text == "here"
    with pytest.raises(WaitTimeout, match=r"sleeps-1 has not ended within 0\.1 s"):
        wait(client, [record.id], timeout_s=0.1)
    canceled, unknown = cancel(client, [record.uuid, "sleeps-9"], message="enough")
    assert canceled.record is not None
    assert unknown.error is not None
    assert "no workflow `sleeps-9`" in unknown.error.message
    (final,) = wait(client, [record.id], timeout_s=60)
    assert final.state is WorkflowState.CANCELED
    assert final.cancel is not None
    assert final.cancel.message == "enough"
    assert [line.text for line in lines] == []


def test_a_failure_is_explained_and_restarted(cli: Cli, client: Client) -> None:
    record = submit(client, plan(client, SubmitRequest(spec=cli.spec(FAILS))))
    wait(client, [record.id], timeout_s=60)
    failed = find_workflow(client, record.id)
    (failure,) = explain_failures(client, failed)
    assert failure.cause is not None
    assert (failure.cause.task, failure.cause.exit_code) == ("one", 7)
    new = restart(client, plan_restart(client, record.id, Overrides(secrets={})))
    assert (new.id, new.parent) == ("fails-2", "fails-1")
    (final,) = wait(client, [new.id], timeout_s=60)
    assert final.state is WorkflowState.FAILED


def test_invalid_input_raises_an_error_and_starts_nothing(cli: Cli, client: Client) -> None:
    with pytest.raises(ProblemsFound):
        plan(client, SubmitRequest(spec="-", text="workflow: {name: x, tasks: [{nam: one}]}"))
    with pytest.raises(InputError):
        plan_restart(client, "counts-7", Overrides(secrets={}))
    assert list_workflows(client, Search()) == []


def test_output_files_are_listed_and_fetched(cli: Cli, client: Client, tmp_path: Path) -> None:
    record = submit(client, plan(client, SubmitRequest(spec="-", text=WRITES)))
    with pytest.raises(InputError, match="no task of writes-1 has run"):
        list_output_files(client, record)
    (final,) = wait(client, [record.id], timeout_s=60)
    one, two, _ = list_output_files(client, final)
    assert [(file.path, file.size) for file in one.files] == [("logs/a.txt", 2), ("model.pt", 2)]
    assert [file.path for file in two.files] == ["b.txt"]
    assert one.directory == str(next(cli.root.glob("*/both/one/0/output")))

    # The files of one task go directly into the folder, those of several tasks into one directory for each.
    def contents(folder: Path) -> list[str]:
        return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())

    progress: list[int] = []
    fetched = fetch_output_files(
        client, final, tmp_path / "m", paths=["*.pt", "./logs/"], on_progress=lambda at: progress.append(at.done)
    )
    assert (fetched.files, fetched.size, fetched.folders, fetched.errors) == (2, 4, {"one": tmp_path / "m"}, ())
    assert contents(tmp_path / "m") == ["logs/a.txt", "model.pt"]
    assert progress[-1] == 4
    fetch_output_files(client, final, tmp_path / "all")
    assert contents(tmp_path / "all") == ["one/logs/a.txt", "one/model.pt", "two/b.txt"]
    assert fetch_output_files(client, final, tmp_path / "all").unchanged == 3
    fetch_output_files(client, final, tmp_path / "w", place="work")
    assert contents(tmp_path / "w") == ["here"]

    with pytest.raises(NotFound, match=r"no output file matches `model\.pth`") as caught:
        fetch_output_files(client, final, tmp_path / "x", paths=["model.pth"])
    assert "did you mean `model.pt`?" in caught.value.hint
    with pytest.raises(NotFound, match="has no task `four`"):
        list_output_files(client, final, tasks=["four"])
    (tmp_path / "x").touch()
    with pytest.raises(StorageError, match="x`: it is not a directory"):
        fetch_output_files(client, final, tmp_path / "x", tasks=["one"])
    with pytest.raises(StorageError, match="x/one`: a parent of it is not a directory"):
        fetch_output_files(client, final, tmp_path / "x")

    # If the files of one task are lost, those of the others are still fetched.
    shutil.rmtree(two.directory)
    fetched = fetch_output_files(client, final, tmp_path / "rest")
    assert contents(tmp_path / "rest") == ["logs/a.txt", "model.pt"]
    (error,) = fetched.errors
    assert "the files of two of writes-1 are gone" in str(error)
    retried = []
    for group in final.groups:
        tasks = tuple(replace(one, attempt=1, node=None, output_dir=None) for one in group.tasks)
        retried.append(replace(group, earlier=group.tasks, tasks=tasks))
    with pytest.raises(InputError, match="has run in its latest attempt") as waiting:
        list_output_files(client, replace(final, groups=tuple(retried)))
    assert waiting.value.hint == "to see the files of an earlier attempt, add --retry-id 0"
