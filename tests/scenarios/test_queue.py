"""Gangs that wait for resources, and one supervisor that serves them all."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from distflow.testing.waiting import wait_until
from scenarios.conftest import Cli
from scenarios.lab import Lab

ONE_GANG = """
workflow:
  name: one
  resources: {default: {gpu: 2}}
  groups:
  - name: train
    tasks:
    - name: master
      lead: true
      ranks: {size: 2}
      command: [sh, -c, 'echo "GPUs $CUDA_VISIBLE_DEVICES"; while [ ! -e GO ]; do sleep 0.2; done']
"""


def test_a_second_gang_waits_and_then_runs(cli: Cli) -> None:
    cli.configure(gpus=2)
    go = cli.folder / "go"
    spec = cli.spec(ONE_GANG.replace("GO", str(go)))
    both = [cli.start("workflow", "submit", spec) for _ in range(2)]
    ids = sorted(process.communicate(timeout=60)[0].strip() for process in both)
    assert ids == ["one-1", "one-2"]
    wait_until(lambda: {cli.query(one)["status"] for one in ids} == {"RUNNING", "PENDING"}, 60)
    waiting = next(one for one in ids if cli.query(one)["status"] == "PENDING")
    wait_until(lambda: "0 of 2 GPUs free" in cli.run("workflow", "query", waiting).out, 30)
    go.touch()
    for one in ids:
        cli.await_status(one, "COMPLETED")
        assert "GPUs 0,1" in cli.logs(one)
    first, second = sorted((cli.query(one) for one in ids), key=lambda answer: str(answer["start_time"]))
    assert first["end_time"] <= second["start_time"]


def test_a_gang_that_never_fits_is_refused_at_once(cli: Cli) -> None:
    cli.configure(gpus=1)
    done = cli.run("workflow", "submit", cli.spec(ONE_GANG))
    assert done.code == 2
    assert "1 GPU" in done.err
    assert json.loads(cli.run("workflow", "list", "-t", "json").out) == {"workflows": []}


@pytest.mark.parametrize("is_lock_removed", [False, True])
def test_further_supervisors_exit_while_one_runs(cli: Cli, is_lock_removed: bool) -> None:
    cli.configure(gpus=2)
    go = cli.folder / "go"
    workflow = cli.submit(cli.spec(ONE_GANG.replace("GO", str(go))))
    running = cli.supervisor()
    if is_lock_removed:
        (cli.state / "supervisor.lock").unlink()
    extra = [
        subprocess.Popen([sys.executable, "-m", "distflow.supervisor", str(cli.state), "-1"], env=cli.environment)
        for _ in range(4)
    ]
    for process in extra:
        assert process.wait(60) == 0
    assert [pid for pid, command in cli.processes() if "distflow.supervisor" in command] == [running]
    go.touch()
    cli.await_status(workflow, "COMPLETED")


def test_one_of_four_supervisors_started_at_once_continues(cli: Cli) -> None:
    cli.configure(gpus=2)
    go = cli.folder / "go"
    workflow = cli.submit(cli.spec(ONE_GANG.replace("GO", str(go))))
    cli.await_running(workflow)
    cli.kill_supervisor()
    command = [sys.executable, "-m", "distflow.supervisor", str(cli.state), "-1"]
    rivals = [subprocess.Popen(command, env=cli.environment) for _ in range(4)]
    wait_until(lambda: sum(process.poll() == 0 for process in rivals) == 3, 60)
    assert cli.supervisor() in [process.pid for process in rivals]
    assert cli.query(workflow)["status"] == "RUNNING"
    go.touch()
    cli.await_status(workflow, "COMPLETED")
    for process in rivals:
        assert process.wait(60) == 0


def test_two_users_do_not_get_the_same_cpus(cli: Cli, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    go = cli.folder / "go"
    cli.configure(cpus=4)
    spec = ONE_GANG.replace("GO", str(go)).replace("gpu: 2", "cpu: 3")
    first = cli.submit(cli.spec(spec))
    cli.await_running(first)
    (tmp_path / "theirs").mkdir()
    other_cli = Cli(tmp_path / "theirs", tmp_path_factory.getbasetemp())
    other_cli.environment["DISTFLOW_CONFIG"] = cli.environment["DISTFLOW_CONFIG"]
    waiting = other_cli.submit(other_cli.spec(spec))
    wait_until(lambda: "1 of 4 CPUs are free and this task needs 3" in other_cli.run("workflow", "query", waiting).out, 30)
    go.touch()
    other_cli.await_status(waiting, "COMPLETED")
    cli.await_status(first, "COMPLETED")
    wait_until(lambda: not other_cli.processes(), 30)


@pytest.mark.ssh
def test_two_users_share_a_pool_without_waiting_for_the_same_node(
    lab: Lab, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    cli, go = lab.cli, lab.cli.folder / "go"
    lab.configure(names=("gpu1", "gpu2"))
    spec = ONE_GANG.replace("GO", str(go))
    first = cli.submit(cli.spec(spec))
    cli.await_running(first)
    (tmp_path / "theirs").mkdir()
    other_cli = Cli(tmp_path / "theirs", tmp_path_factory.getbasetemp())
    other_cli.environment["DISTFLOW_CONFIG"] = cli.environment["DISTFLOW_CONFIG"]
    second, third = other_cli.submit(other_cli.spec(spec)), other_cli.submit(other_cli.spec(spec))
    other_cli.await_running(second)
    nodes = [one.query(name)["groups"][0]["tasks"][0]["node_name"] for one, name in ((cli, first), (other_cli, second))]
    assert sorted(nodes) == ["gpu1", "gpu2"]
    wait_until(lambda: "gpu" in other_cli.query(third)["groups"][0]["message"], 30)
    go.touch()
    for one, name in ((cli, first), (other_cli, second), (other_cli, third)):
        one.await_status(name, "COMPLETED")
    wait_until(lambda: not other_cli.processes(), 30)
