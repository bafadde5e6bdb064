"""What is slow to import waits until it is needed."""

from __future__ import annotations

import subprocess
import sys

import pytest

from distflow.transports.ssh import _without_invoke


@pytest.mark.parametrize("module", ["ssh.config", "base", "local"])
def test_these_do_not_import_paramiko(module: str) -> None:
    code = f"import sys, distflow.transports.{module}; sys.exit('paramiko' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_paramiko_comes_without_the_task_runner_that_it_does_not_need() -> None:
    code = """
import sys
from distflow.transports.ssh import load_ssh
assert "paramiko" not in sys.modules
assert load_ssh() is load_ssh()
assert "paramiko" in sys.modules and "invoke" not in sys.modules
import invoke  # whoever wants it has it
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_two_threads_may_ask_for_it_at_the_same_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "invoke", raising=False)
    with _without_invoke():
        del sys.modules["invoke"]  # as the other one does, which has come to the end first
    assert "invoke" not in sys.modules
