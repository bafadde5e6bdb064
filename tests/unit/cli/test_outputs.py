"""The commands that ``distflow workflow outputs`` suggests."""

from __future__ import annotations

import pytest

from distflow.cli.app import run
from distflow.client.outputs import OutputFile, TaskOutputs
from distflow.lifecycle.states import State
from distflow.structs import replace
from unit.cli.screen import Screen
from unit.state.stored import completed_group, submit, task, workflow


@pytest.mark.parametrize(
    ("options", "suggested"),
    [
        ([], "fetch {id}"),
        (["-r", "0", "--task", "a"], "fetch {id} --task a --retry-id 0"),
        (["--workdir", "-r", "0"], "fetch {id} --workdir --retry-id 0"),
    ],
)
def test_the_suggested_command_copies_the_listed_files(
    screen: Screen, options: list[str], suggested: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    record = submit(screen.store, workflow([]))
    found = TaskOutputs(task="a", node="n", directory="/out", files=(OutputFile(path="m.pt", size=1, modified_at=0.0),))
    monkeypatch.setattr("distflow.cli.workflow.outputs.list_output_files", lambda *_, **__: (found,))
    assert run(["workflow", "outputs", record.id, *options]) == 0
    assert capsys.readouterr().err.endswith(f"To copy them: distflow workflow {suggested.format(id=record.id)}\n")


def test_the_suggestion_without_files_keeps_the_chosen_attempt(
    screen: Screen, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    record = submit(screen.store, workflow([]))
    monkeypatch.setattr("distflow.cli.workflow.outputs.list_output_files", lambda *_, **__: ())
    assert run(["workflow", "outputs", record.id, "-r", "1"]) == 0
    assert capsys.readouterr().err.endswith(f"directories: distflow workflow outputs {record.id} --workdir --retry-id 1\n")


@pytest.mark.parametrize(
    ("attempt", "message", "hint"),
    [
        (0, "worker of {id} has not run", "details: distflow workflow query {id}"),
        (
            1,
            "retry 1 of worker of {id} has not run",
            "to copy the output of the attempt before it: distflow workflow fetch {id} --task worker --retry-id 0",
        ),
    ],
)
def test_the_output_of_an_attempt_that_has_not_run_is_an_error(
    screen: Screen, capsys: pytest.CaptureFixture[str], attempt: int, message: str, hint: str
) -> None:
    waiting = task("worker", State.CANCELED, node=None, attempt=attempt)
    record = submit(screen.store, workflow([replace(completed_group(), tasks=(waiting,))]))
    assert run(["workflow", "outputs", record.id, "--task", "worker"]) == 2
    text = f"error: {message}, so it has no output\n{hint}\n".format(id=record.id)
    assert capsys.readouterr().err == text
