"""The start of a gang's Ray cluster, with a replacement for Ray's command line. ``tests/scenarios`` runs the real one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from distflow import ray_cluster

HEAD = ["head", "--address", "10.0.0.1:6379", "--node-address", "10.0.0.1", "--gpus", "4", "--nodes", "2"]
WORKER = ["worker", "--address", "10.0.0.1:6379", "--node-address", "10.0.0.2", "--cpus", "8"]


def write_program(folder: Path, name: str, text: str) -> None:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o700)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A directory with a program `ray` that records its arguments, and a module `ray` with the number of nodes in a file."""
    write_program(
        tmp_path, "ray", 'echo "$@" >> "$(dirname "$0")/calls"; exit "$(cat "$(dirname "$0")/code" 2>/dev/null || echo 0)"'
    )
    (tmp_path / "ray.py").write_text(
        "import pathlib\ninit = lambda **_: None\n"
        "count = pathlib.Path(__file__).with_name('count')\n"
        "def nodes():\n"
        "    number = int(count.read_text()); count.write_text(str(number + 1))\n"
        "    return [{'Alive': True}] * number + [{'Alive': False}]\n"
    )
    (tmp_path / "count").write_text("1")
    return tmp_path


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(folder), *(os.environ.get("PYTHONPATH") or "").split(os.pathsep)])
    return subprocess.run(
        [sys.executable, "-m", "distflow.ray_cluster", *arguments], capture_output=True, text=True, check=False, timeout=60,
        env={**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", "PYTHONPATH": path},
    )  # fmt: skip


def test_the_head_waits_for_all_nodes_and_then_runs_the_command(folder: Path) -> None:
    done = run(folder, *HEAD, "--", "sh", "-c", "echo began -- $0; exit 5", "x y")
    assert (done.returncode, done.stdout) == (5, "began -- x y\n"), done.stderr
    assert "all 2 nodes have joined" in done.stderr
    assert (folder / "calls").read_text() == (
        "start --node-ip-address 10.0.0.1 --disable-usage-stats --num-gpus 4 --head --port 6379 --include-dashboard=false\n"
    )
    assert (folder / "count").read_text() == "3"


def test_missing_nodes_are_an_error_after_the_timeout(folder: Path) -> None:
    done = run(folder, *HEAD, "--timeout", "0.5", "--nodes", "9", "--", "echo", "began")
    assert done.returncode == 1
    assert "of 9 nodes have joined Ray after 0.5 s" in done.stderr
    assert "began" not in done.stdout


def test_the_error_of_a_ray_that_does_not_answer_is_shown(folder: Path) -> None:
    (folder / "ray.py").write_text("raise ConnectionError('no such cluster')\n")
    done = run(folder, *HEAD, "--timeout", "0.1", "--", "echo", "began")
    assert done.returncode == 1
    assert "Ray on this node does not answer: ConnectionError: no such cluster\n" in done.stderr


def test_the_exit_code_of_a_head_that_cannot_start_is_returned(folder: Path) -> None:
    (folder / "code").write_text("7")
    assert run(folder, *HEAD, "--", "echo", "began").returncode == 7


def test_a_worker_retries_until_its_timeout(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    (folder / "code").write_text("4")
    times = iter([0.0, 1.0, 119.0, 121.0])
    monkeypatch.setattr(ray_cluster, "_pause", lambda: None)
    assert ray_cluster.main(WORKER, clock=lambda: next(times)) == 4
    calls = (folder / "calls").read_text().splitlines()
    assert set(calls) == {"start --node-ip-address 10.0.0.2 --disable-usage-stats --num-cpus 8 --address 10.0.0.1:6379 --block"}
    assert len(calls) == 3


def test_a_worker_that_ends_after_its_timeout_is_not_retried(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    times = iter([0.0, 500.0])
    assert ray_cluster.main(WORKER, clock=lambda: next(times)) == 1
    assert len((folder / "calls").read_text().splitlines()) == 1


def test_a_missing_ray_is_an_error_with_a_remedy(folder: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "distflow.ray_cluster", *WORKER], capture_output=True, text=True, check=False, timeout=60,
        env={**os.environ, "PATH": "/nowhere"},
    )  # fmt: skip
    assert done.returncode == 127
    assert "pip install ray" in done.stderr


def test_a_command_that_does_not_exist_is_named(folder: Path) -> None:
    done = run(folder, *HEAD, "--", "no-such-command")
    assert done.returncode == 127
    assert done.stderr.splitlines()[-1] == "no-such-command: not found"


def test_a_command_that_cannot_be_executed_is_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ray_cluster, "_head", lambda *_: 0)
    command = folder / "train.sh"
    command.touch(0o600)
    assert ray_cluster.main([*HEAD, "--", str(command)]) == 126
    assert capsys.readouterr().err == f"{command}: Permission denied\n"
    (folder / "ray").chmod(0o600)
    monkeypatch.setenv("PATH", str(folder))
    assert ray_cluster.main(WORKER) == 126
    assert capsys.readouterr().err == "ray: Permission denied\n"


@pytest.mark.parametrize("arguments", [HEAD, [*WORKER, "--", "true"]])
def test_the_head_needs_a_command_and_a_worker_refuses_one(arguments: list[str], folder: Path) -> None:
    assert run(folder, *arguments).returncode == 2
