"""Modules that are slow to import are imported only when they are needed."""

from __future__ import annotations

import subprocess
import sys

import pytest

from distflow.transports.ssh import _without_invoke


@pytest.mark.parametrize("module", ["ssh.config", "base", "local"])
def test_modules_without_ssh_do_not_import_paramiko(module: str) -> None:
    code = f"import sys, distflow.transports.{module}; sys.exit('paramiko' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_paramiko_is_imported_without_invoke() -> None:
    code = """
import sys
from distflow.transports.ssh import load_ssh
assert "paramiko" not in sys.modules
assert load_ssh() is load_ssh()
assert "paramiko" in sys.modules and "invoke" not in sys.modules
import invoke  # other code can still import it
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_two_threads_may_import_paramiko_at_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "invoke", raising=False)
    with _without_invoke():
        del sys.modules["invoke"]  # as another thread does that leaves the block first
    assert "invoke" not in sys.modules
