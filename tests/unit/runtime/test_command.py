"""How the guard starts the command of an attempt."""

from __future__ import annotations

import os
from pathlib import Path

from distflow.runtime.guard import command


def test_a_failure_of_the_child_before_the_program_starts_is_reported(tmp_path: Path) -> None:
    not_open = 1 << 20
    spawned = command.spawn({"argv": ["true"], "env": {}}, "", str(tmp_path), not_open, 0o77)
    os.close(spawned.go)
    os.waitpid(spawned.pid, 0)
    failure = command.read_failure(spawned.failure)
    os.close(spawned.failure)
    assert failure is not None
    assert failure["exit_code"] == 126
    assert failure["message"].startswith("the child process failed before the program was started: OSError(9")
