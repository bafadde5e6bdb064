"""Groups that depend on one another, run to their end with real processes."""

from __future__ import annotations

import json
import os
import signal

from distflow.testing.waiting import wait_until
from scenarios.conftest import Cli

CHAIN = """
workflow:
  name: chain
  tasks:
  - {{name: prepare, command: [sh, -c, '{prepare}']}}
  - {{name: train, command: [echo, trained], inputs: [{{task: prepare}}]}}
  - {{name: rate, command: [echo, rated], inputs: [{{task: train}}]}}
  - {{name: aside, command: [echo, aside]}}
"""


def test_a_chain_runs_in_its_order(cli: Cli) -> None:
    done = cli.run("workflow", "submit", cli.spec(CHAIN.format(prepare="echo prepared")), "--wait")
    assert done.code == 0, done.err
    words = [word for line in done.out.splitlines() for word in ("prepared", "trained", "rated") if word in line.split()]
    assert words == ["prepared", "trained", "rated"]
    events = cli.run("workflow", "events", "chain-1").out
    assert "train-group: waits for prepare-group" in events
    assert events.index("prepare-group: COMPLETED") < events.index("train-group: SCHEDULING")


def test_a_failure_ends_what_waits_for_it_and_nothing_else(cli: Cli) -> None:
    done = cli.run("workflow", "submit", cli.spec(CHAIN.format(prepare="exit 3")), "--wait")
    assert done.code == 1
    tasks = cli.tasks("chain-1")
    assert {name: task["status"] for name, task in tasks.items()} == {
        "prepare": "FAILED", "train": "FAILED_UPSTREAM", "rate": "FAILED_UPSTREAM", "aside": "COMPLETED",
    }  # fmt: skip
    shown = cli.run("workflow", "query", "chain-1").out
    assert "train-group, which it depends on, did not complete: FAILED_UPSTREAM" in shown
    assert cli.query("chain-1")["status"] == "FAILED"


def test_a_supervisor_that_is_killed_in_the_middle_goes_on_there(cli: Cli) -> None:
    spec = cli.spec(CHAIN.format(prepare="while ! test -e ../../../../../go; do sleep 0.05; done"))
    ident = cli.submit(spec)
    wait_until(lambda: cli.tasks(ident)["prepare"]["status"] == "RUNNING", 60)
    group = next(one for one in cli.query(ident)["groups"] if one["name"] == "train-group")
    assert (group["status"], group["message"], group["remaining_upstream_groups"], group["downstream_groups"]) == (
        "WAITING", "waits for prepare-group", ["prepare-group"], ["rate-group"],
    )  # fmt: skip
    pid = cli.supervisor()
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: cli.supervisor() is None, 30)
    (cli.root / "go").touch()
    cli.await_status(ident, "COMPLETED")
    assert {task["status"] for task in cli.tasks(ident).values()} == {"COMPLETED"}


def test_a_cancel_ends_what_waits(cli: Cli) -> None:
    ident = cli.submit(cli.spec(CHAIN.format(prepare="sleep 600")))
    wait_until(lambda: cli.tasks(ident)["prepare"]["status"] == "RUNNING", 60)
    assert cli.run("workflow", "cancel", ident, "--wait", "60").code == 0
    assert {name: task["status"] for name, task in cli.tasks(ident).items() if name != "aside"} == dict.fromkeys(
        ("prepare", "train", "rate"), "FAILED_CANCELED"
    )


def test_the_dry_run_and_validate_say_what_waits_for_what(cli: Cli) -> None:
    spec = cli.spec(CHAIN.format(prepare="true"))
    assert "group train-group: 1 task, waits for prepare-group" in cli.run("workflow", "submit", spec, "--dry-run").out
    assert "  train-group waits for prepare-group\n" in cli.run("workflow", "validate", spec).out
    plan = json.loads(cli.run("workflow", "submit", spec, "--dry-run", "-t", "json").out)
    assert [group["upstream_groups"] for group in plan["groups"]] == [[], ["prepare-group"], ["train-group"], []]
