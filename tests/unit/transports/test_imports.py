"""What is slow to import waits until it is needed."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize("module", ["destination", "sshconfig", "sshhost", "sshcommand", "fanout", "local"])
def test_these_do_not_import_paramiko(module: str) -> None:
    code = f"import sys, distflow.transports.{module}; sys.exit('paramiko' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_paramiko_comes_without_the_task_runner_that_it_does_not_need() -> None:
    code = """
import sys
from distflow.transports.loading import load_ssh
assert "paramiko" not in sys.modules
assert load_ssh() is load_ssh()
assert "paramiko" in sys.modules and "invoke" not in sys.modules
import invoke  # whoever wants it has it
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
