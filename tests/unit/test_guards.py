"""The signal handling of ``tests/conftest.py``."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = """
import signal, sys

signal.signal(signal.SIGINT, signal.SIG_IGN)
sys.path.insert(0, sys.argv[1])
import conftest

assert signal.getsignal(signal.SIGINT) is signal.default_int_handler, signal.getsignal(signal.SIGINT)
"""


def test_conftest_restores_the_sigint_handler_if_sigint_is_ignored() -> None:
    tests = str(Path(__file__).resolve().parents[1])
    done = subprocess.run([sys.executable, "-c", SCRIPT, tests], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
