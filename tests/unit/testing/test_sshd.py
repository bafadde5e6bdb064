"""The processes of an OpenSSH server for tests."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from distflow.testing.sshd import _descendants
from distflow.testing.waiting import wait_until


@pytest.mark.parametrize("name", ["sshd", "sshd-session", "sshd-auth"])
def test_processes_of_every_version_of_openssh_are_found(name: str, tmp_path: Path) -> None:
    program = tmp_path / name
    program.symlink_to(sys.executable)
    with subprocess.Popen([program, "-I", "-S", "-c", "input()"], stdin=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        wait_until(lambda: process.pid in _descendants(os.getpid()), 20, f"{name} is found")
