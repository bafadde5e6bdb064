"""The commands that ``distflow workflow outputs`` suggests."""

from __future__ import annotations

import pytest

from distflow.cli.app import run
from distflow.client.outputs import OutputFile, TaskOutputs
from unit.cli.screen import Screen
from unit.state.stored import submit, workflow


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
