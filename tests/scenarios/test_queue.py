"""Gangs wait for each other, and one supervisor serves them all."""

from __future__ import annotations

import subprocess
import sys

from distflow.testing.waiting import wait_until
from scenarios.conftest import Cli

ONE_GANG = """
workflow:
  name: one
  resources: {default: {gpu: 2}}
  groups:
  - name: train
    tasks:
    - {name: master, lead: true, ranks: {size: 2}, command: [sh, -c, 'echo $CUDA_VISIBLE_DEVICES; sleep 6']}
"""


def test_a_second_gang_waits_and_then_runs(cli: Cli) -> None:
    cli.configure(gpus=2)
    spec = cli.spec(ONE_GANG)
    both = [cli.start("workflow", "submit", spec) for _ in range(2)]
    ids = sorted(process.communicate(timeout=60)[0].strip() for process in both)
    assert ids == ["one-1", "one-2"]
    wait_until(lambda: {cli.query(one)["status"] for one in ids} == {"RUNNING", "PENDING"}, 20)
    waiting = next(one for one in ids if cli.query(one)["status"] == "PENDING")
    wait_until(lambda: "0 of 2 GPUs free" in cli.run("workflow", "query", waiting).out, 10)
    for one in ids:
        cli.await_status(one, "COMPLETED")
        assert "0,1" in cli.logs(one)
    first, second = sorted((cli.query(one) for one in ids), key=lambda answer: str(answer["start_time"]))
    assert first["end_time"] <= second["start_time"]


def test_a_gang_that_never_fits_is_refused_at_once(cli: Cli) -> None:
    cli.configure(gpus=1)
    done = cli.run("workflow", "submit", cli.spec(ONE_GANG))
    assert done.code == 2
    assert "1 GPU" in done.err
    assert cli.run("workflow", "list").out.strip() == "" or "no workflows" in cli.run("workflow", "list").err.lower()


def test_four_supervisors_leave_one(cli: Cli) -> None:
    cli.configure(gpus=2)
    workflow = cli.submit(cli.spec(ONE_GANG.replace("sleep 6", "sleep 4")))
    extra = [
        subprocess.Popen([sys.executable, "-m", "distflow.supervisor", str(cli.state), "-1"], env=cli.environment)
        for _ in range(4)
    ]
    for process in extra:
        assert process.wait(20) == 0
    supervisors = [command for _, command in cli.processes() if "distflow.supervisor" in command]
    assert len(supervisors) == 1
    cli.await_status(workflow, "COMPLETED")
