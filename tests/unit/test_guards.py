"""The suite's own guards (``tests/conftest.py``)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

BACKGROUND = """
import signal, sys

signal.signal(signal.SIGINT, signal.SIG_IGN)
sys.path.insert(0, sys.argv[1])
import conftest

assert signal.getsignal(signal.SIGINT) is signal.default_int_handler, signal.getsignal(signal.SIGINT)
"""


def test_tests_and_what_they_start_heed_ctrl_c_in_a_shells_background_too() -> None:
    tests = str(Path(__file__).resolve().parents[1])
    done = subprocess.run([sys.executable, "-c", BACKGROUND, tests], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
