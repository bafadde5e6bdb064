"""The targets of the Makefile install only what they need."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
@pytest.mark.parametrize(
    ("target", "installed", "extras"),
    [
        ("demo", None, "train"),
        ("demo", ".installed-for-demo", None),
        ("demo", ".installed", None),
        ("test", ".installed-for-demo", "train,data,dev"),
    ],
)
def test_a_target_installs_only_its_extras(
    target: str, installed: str | None, extras: str | None, repository: Path, tmp_path: Path
) -> None:
    if installed is not None:
        (tmp_path / installed).touch()
    command = ["make", "--dry-run", target, f"VENV={tmp_path}", "PYTHON=python3"]
    done = subprocess.run(command, cwd=repository, capture_output=True, text=True, check=True)
    installs = [line for line in done.stdout.splitlines() if "setup.sh" in line]
    assert installs == ([f'PYTHON="python3" sh scripts/setup.sh {tmp_path} {extras}'] if extras else [])


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_all_benchmarks_run_after_a_failure(repository: Path, tmp_path: Path) -> None:
    (tmp_path / ".installed").touch()
    (tmp_path / "bin").mkdir()
    python = tmp_path / "bin" / "python"
    python.write_text('#!/bin/sh\necho "ran $1"\ncase "$1" in */launch.py) exit 1;; */fanout.py) exit 2;; esac\n')
    python.chmod(0o755)
    shown = subprocess.run(
        ["make", "--dry-run", "bench", f"VENV={tmp_path}"], cwd=repository, capture_output=True, text=True, check=True
    ).stdout
    # The commands before these install packages of the system.
    commands = shown[shown.index("failed=") :]
    done = subprocess.run(["sh", "-c", commands], cwd=repository, capture_output=True, text=True, check=False)
    assert done.stdout.count("ran benchmarks/") == 10
    assert (done.returncode, done.stderr) == (1, "these benchmarks failed or missed a limit: launch fanout\n")
