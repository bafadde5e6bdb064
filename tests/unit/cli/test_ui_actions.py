"""The actions of the web page."""

from __future__ import annotations

from typing import Any

import pytest

from distflow.errors import InputError, SecretsMissing
from unit.cli.screen import Screen
from unit.state.stored import submit, workflow


def test_a_restart_that_needs_secrets_names_the_command_for_them(screen: Screen, monkeypatch: pytest.MonkeyPatch) -> None:
    server: Any = pytest.importorskip("distflow.cli.ui.server")
    record = submit(screen.store, workflow([]))

    def plan_restart(*_: object) -> None:
        raise SecretsMissing(record.id, ["TOKEN"])

    monkeypatch.setattr("distflow.client.submission.plan_restart", plan_restart)
    with pytest.raises(InputError) as found:
        server._restart(screen.client, record, None)
    assert found.value.hint == f"use a terminal: `distflow workflow restart {record.id} --set-env TOKEN=…`"
