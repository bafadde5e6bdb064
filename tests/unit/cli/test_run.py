"""Errors at the end of ``distflow run``."""

from __future__ import annotations

from pathlib import Path

import pytest
import typer

from distflow.cli.options import Format
from distflow.cli.run import _finish
from distflow.errors import StorageError, WorkflowEnded
from unit.cli.screen import Screen
from unit.state.stored import workflow


def test_an_error_of_the_workflow_takes_precedence_over_an_error_of_the_fetch(
    screen: Screen, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(error: Exception) -> None:
        raise error

    ended, refused = WorkflowEnded(""), StorageError("outputs: it is not a directory")
    monkeypatch.setattr("distflow.client.spec_drafts.quick_run.fetch_results", lambda *_, **__: fail(refused))
    monkeypatch.setattr("distflow.cli.workflow.submission.wait_for_end", lambda *_, **__: fail(ended))
    with pytest.raises(WorkflowEnded):
        _finish(screen.client, workflow([]), Path("outputs"), Format.TEXT)
    assert capsys.readouterr().err == "error: outputs: it is not a directory\n"
    monkeypatch.setattr("distflow.cli.workflow.submission.wait_for_end", lambda *_, **__: None)
    with pytest.raises(StorageError):
        _finish(screen.client, workflow([]), Path("outputs"), Format.TEXT)
    # With JSON, standard output already has the document of the workflow, and an error would add a second one.
    with pytest.raises(typer.Exit) as exited:
        _finish(screen.client, workflow([]), Path("outputs"), Format.JSON)
    assert (exited.value.exit_code, capsys.readouterr().err) == (
        StorageError.exit_code,
        "error: outputs: it is not a directory\n",
    )
