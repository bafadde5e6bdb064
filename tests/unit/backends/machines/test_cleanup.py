"""Reading a node's report of its workflows, which is not trusted: names and numbers must be valid."""

from __future__ import annotations

from typing import Any

import pytest

from distflow.backends.machines.cleanup import _workflow

UUID = "0b51e6a25bd54f0c9c5e6d2f4e7b1a01"


def answer(**changes: Any) -> dict[str, Any]:
    attempt = {"attempt": f"{UUID}/g/t/0", "phase": "running", "pid": 7, "started_at": 1.5, "directory": "/r/x"} | changes
    return {"uuid": UUID, "memo": "", "attempts": [attempt]}


def test_a_valid_answer() -> None:
    (attempt,) = _workflow(answer(), None).attempts
    assert (attempt.name, attempt.pid, attempt.started_at, attempt.directory) == (f"{UUID}/g/t/0", 7, 1.5, "/r/x")


@pytest.mark.parametrize(
    "changes",
    [
        {"attempt": f"{UUID}/../../x/0"}, {"attempt": f"{UUID}/g/t/-1"}, {"attempt": "other/g/t/0"}, {"attempt": 3},
        {"pid": "7"}, {"pid": -1}, {"pid": True}, {"started_at": "now"}, {"directory": "/r\x1b[2J"}, {"directory": "x" * 5000},
        {"phase": None},
    ],
)  # fmt: skip
def test_invalid_fields_are_rejected(changes: dict[str, Any]) -> None:
    with pytest.raises((ValueError, TypeError)):
        _workflow(answer(**changes), None)
