"""Errors of ``distflow workflow cancel``."""

from __future__ import annotations

import pytest

from distflow.cli.app import run
from distflow.client.workflows import Cancellation
from distflow.errors import NotFound, WaitTimeout
from unit.cli.screen import Screen
from unit.state.stored import submit, workflow


def test_a_wait_timeout_does_not_hide_errors_of_other_workflows(
    screen: Screen, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    record = submit(screen.store, workflow([]))
    results = [Cancellation(key="x-1", error=NotFound("there is no workflow x-1")), Cancellation(key=record.id, record=record)]

    def wait(*_: object, **__: object) -> None:
        raise WaitTimeout("not ended within 1 s")

    monkeypatch.setattr("distflow.cli.workflow.manage.cancel", lambda *_, **__: results)
    monkeypatch.setattr("distflow.cli.workflow.manage.wait", wait)
    assert run(["workflow", "cancel", "x-1", record.id, "--wait", "1"]) == 3
    assert capsys.readouterr().err == "error: there is no workflow x-1\nerror: not ended within 1 s\n"
