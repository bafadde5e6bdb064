"""A gang without a supervisor: one task fails, the others are stopped, and the next command shows the cause."""

from __future__ import annotations

import os
from pathlib import Path

from distflow.testing.waiting import wait_until
from scenarios.conftest import Cli
from scenarios.lab import Lab

GANG = """
workflow:
  name: unwatched
  groups:
  - name: train
    tasks:
    - {name: master, lead: true, ranks: {size: 1}, command: [sleep, 'LONG1']}
    - {name: worker, ranks: {size: 1}, command: [sh, -c, 'echo here; while [ ! -e GO ]; do sleep 0.2; done; exit 7']}
    - {name: other, ranks: {size: 1}, command: [sh, -c, "trap '' TERM; sleep LONG2 & wait"]}
"""


def test_a_failed_gang_stops_without_a_supervisor(lab: Lab, tmp_path: Path) -> None:
    cli: Cli = lab.cli
    go = tmp_path / "go"
    numbers = {f"LONG{one}": str(500_000 + 2 * os.getpid() + one) for one in (1, 2)}
    text = GANG.replace("GO", str(go))
    for word, number in numbers.items():
        text = text.replace(word, number)
    workflow = cli.submit(cli.spec(text))
    cli.await_running(workflow)
    cli.await_log(workflow, "here")
    cli.kill_supervisor()
    go.touch()

    def sleepers() -> list[str]:
        return [command for _, command in cli.processes() if any(number in command for number in numbers.values())]

    wait_until(lambda: not sleepers(), 30, "the other tasks are stopped without agents and a supervisor")
    assert cli.supervisor() is None
    answer = cli.await_status(workflow, "FAILED")
    group = answer["groups"][0]
    assert (group["first_cause"]["task"], group["first_cause"]["exit_code"]) == ("worker", 7)
    tasks = cli.tasks(workflow)
    for name in ("master", "other"):
        assert (tasks[name]["status"], tasks[name]["reason"]) == ("FAILED", "PEER_FAILED")
        assert tasks[name]["failure_message"] == "stopped because worker failed (exit code 7)"
    lab.await_no_processes()
