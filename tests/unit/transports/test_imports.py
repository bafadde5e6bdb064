"""What is slow to import waits until it is needed."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize("module", ["destination", "sshconfig", "sshhost", "sshcommand", "fanout", "local"])
def test_these_do_not_import_paramiko(module: str) -> None:
    code = f"import sys, distflow.transports.{module}; sys.exit('paramiko' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
