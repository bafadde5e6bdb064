"""The client as a program uses it, without the command line: real processes on this machine."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from distflow.client import (
    Client,
    SubmitRequest,
    cancel,
    choose_tasks,
    explain_failures,
    find_workflow,
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
from distflow.errors import InputError, WaitTimeout
from distflow.lifecycle.states import WorkflowState
from distflow.shell import Secret
from distflow.state.record import Priority
from distflow.state.search import Search
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


@pytest.fixture
def client(cli: Cli, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Iterator[Client]:
    """A client in the directories of ``cli``, of which no command is run. Whatever it does, it prints nothing."""
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
    assert [(one.id, one.priority) for one in found] == [("counts-1", Priority.NORMAL)]


def test_a_running_workflow_is_canceled(cli: Cli, client: Client) -> None:
    record = submit(client, plan(client, SubmitRequest(spec="-", text=SLEEPS)))
    lines = iter(stream_logs(client, record, choose_tasks(record, ()), follow=True))
    assert next(lines).text == "here"
    with pytest.raises(WaitTimeout, match=r"not ended within 0\.1 s: sleeps-1"):
        wait(client, [record.id], timeout_s=0.1)
    asked, unknown = cancel(client, [record.uuid, "sleeps-9"], message="enough")
    assert asked.record is not None
    assert unknown.error is not None
    assert "no workflow 'sleeps-9'" in unknown.error.message
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


def test_wrong_input_is_an_error_and_starts_nothing(cli: Cli, client: Client) -> None:
    with pytest.raises(ProblemsFound):
        plan(client, SubmitRequest(spec="-", text="workflow: {name: x, tasks: [{nam: one}]}"))
    with pytest.raises(InputError):
        plan_restart(client, "counts-7", Overrides(secrets={}))
    assert list_workflows(client, Search()) == []
