"""Restarts of failed workflows, which keep completed groups and their outputs, on this machine and over SSH.

A later workflow can read the same outputs.
"""

from __future__ import annotations

import json
import shutil

import pytest

from scenarios.conftest import Cli
from scenarios.lab import Lab

SPEC = """
workflow:
  name: stages
  labels: {team: vision}
  tasks:
  - name: prepare
    command: [sh, -c, 'echo prepared; date +%s%N > "{{output}}/when"']
  - name: aside
    command: [echo, aside]
  - name: train
    command: [sh, -c, 'test -e GO && cp "{{input:0}}/when" "{{output}}/when"']
    inputs: [{task: prepare}]
  - name: rate
    command: [sh, -c, 'cat "{{input:train}}/when" "{{input:prepare}}/when"; test -e GO2']
    inputs: [{task: train}, {task: prepare}]
"""


def write_spec(cli: Cli) -> str:
    return cli.spec(SPEC.replace("GO", f"{cli.folder}/go"))


LATER = """
workflow:
  name: later
  tasks:
  - name: use
    command: [sh, -c, 'cat "{{input:1}}/when"; ls "{{input:0}}"; echo 0']
    inputs:
    - {task: stages-1:prepare, regex: nothing}
    - task: stages-1:prepare
"""


@pytest.mark.parametrize("backend", ["local", "ssh"])
def test_a_later_workflow_and_a_restart_use_the_outputs_of_a_failed_workflow(
    backend: str, cli: Cli, request: pytest.FixtureRequest
) -> None:
    if backend == "ssh":
        request.getfixturevalue("lab")
    later = cli.spec(LATER, "later.yaml")
    missing = cli.run("workflow", "validate", later)
    assert missing.code == 2
    assert "later.yaml:8: error: there is no workflow `stages-1`" in missing.err
    assert cli.run("workflow", "submit", write_spec(cli), "--priority", "high", "--wait").code == 1
    # The workflow has failed, but the outputs of its tasks still exist.
    _read_outputs_in_a_later_workflow(cli, later)
    _restart_incomplete_groups(cli)


def _read_outputs_in_a_later_workflow(cli: Cli, later: str) -> None:
    assert (
        "output of prepare in stages-1 (only nothing) → <ATTEMPT_DIR>/input/0"
        in cli.run("workflow", "submit", later, "--dry-run").out
    )
    done = cli.run("workflow", "submit", later, "--wait")
    assert done.code == 0, done.err
    lines = [line.removeprefix("[use] ") for line in done.out.splitlines() if line.startswith("[use] ")]
    assert lines[0].isdigit()
    assert lines[1:] == ["0"]
    for name, message in (
        ("stages-1:missing", "stages-1 has no task `missing`"),
        ("stages-1:rate", "rate of stages-1 has not run, so it has no output"),
        ("stages:x", "`stages:x` does not name a task"),
    ):
        refused = cli.run("workflow", "submit", cli.spec(LATER.replace("stages-1:prepare", name), "other.yaml"))
        assert refused.code == 2
        assert message in refused.err
    assert cli.run("workflow", "submit", "later-1", "--wait").code == 0


def _restart_incomplete_groups(cli: Cli) -> None:
    (cli.folder / "go").touch()
    (cli.folder / "stages-1").touch()  # a file with the name of the workflow does not matter
    done = cli.run("workflow", "restart", "stages-1", "--wait")
    assert done.code == 1, done.err  # `rate` needs the file go2, too
    assert "prepared" not in done.out
    tasks = cli.tasks("stages-2")
    assert {name: task["status"] for name, task in tasks.items()} == {
        "prepare": "COMPLETED", "aside": "COMPLETED", "train": "COMPLETED", "rate": "FAILED",
    }  # fmt: skip
    # A restart of a restart: `prepare` was kept twice, and its output is still where it ran.
    (cli.folder / "go2").touch()
    done = cli.run("workflow", "restart", "stages-2", "--wait")
    assert done.code == 0, done.err
    first, second = (line.removeprefix("[rate] ") for line in done.out.splitlines() if line.startswith("[rate] 1"))
    assert first == second
    answer = cli.query("stages-3")
    assert (answer["parent_name"], answer["priority"], answer["labels"]) == ("stages-2", "HIGH", {"team": "vision"})
    assert {group["name"]: group["kept_from"] for group in answer["groups"]} == {
        "prepare-group": "stages-1", "aside-group": "stages-1", "train-group": "stages-2", "rate-group": None,
    }  # fmt: skip
    shown = cli.run("workflow", "query", "stages-3").out
    assert "Restarts     stages-2" in shown
    assert "kept from stages-1" in shown
    events = cli.run("workflow", "events", "stages-3").out
    assert "restarted from stages-2 by" in events
    assert "; kept: prepare-group, aside-group, train-group" in events
    assert not list(cli.state.rglob("incoming-*"))


def test_impossible_restarts_are_reported(cli: Cli) -> None:
    (cli.folder / "go").touch()
    (cli.folder / "go2").touch()
    assert cli.run("workflow", "submit", write_spec(cli), "--wait").code == 0
    running = cli.submit(cli.spec("workflow: {name: long, tasks: [{name: a, command: [sleep, '600']}]}", "long.yaml"))
    for ident, message in (
        (
            "stages-1",
            (
                "stages-1 completed, so there is nothing to restart\n"
                "to run the whole workflow again: distflow workflow submit stages-1"
            ),
        ),
        (running, "long-1 cannot be restarted, because it has not ended: "),
        ("stages-7", "there is no workflow `stages-7`"),
        ("nothing", "`nothing` is not the id of a workflow"),
    ):
        done = cli.run("workflow", "restart", ident)
        assert (done.code, done.out) == (2, "")
        assert message in done.err
    assert cli.run("workflow", "cancel", running, "--wait", "60").code == 0
    restarted = cli.run("workflow", "restart", running, "-t", "json")
    assert restarted.code == 0, restarted.err
    assert json.loads(restarted.out)["parent_name"] == "long-1"
    assert cli.run("workflow", "cancel", "long-2", "--wait", "60").code == 0


def test_restart_reports_missing_outputs_and_submits_nothing(lab: Lab, cli: Cli) -> None:
    assert cli.run("workflow", "submit", write_spec(cli), "--wait").code == 1
    node = cli.tasks("stages-1")["prepare"]["node_name"]
    shutil.rmtree(cli.folder / node / "distflow-node" / cli.query("stages-1")["uuid"])
    done = cli.run("workflow", "restart", "stages-1")
    assert done.code == 3
    assert f"{node}: the output of prepare of stages-1 cannot be fetched: " in done.err
    lab.servers[node].stop()
    lab.configure(connect_timeout="2s")
    done = cli.run("workflow", "restart", "stages-1")
    assert done.code == 3
    assert f"{node}: the output of prepare of stages-1 cannot be fetched: " in done.err
    assert cli.run("workflow", "query", "stages-2").code == 2
    # The whole workflow can still be submitted again.
    lab.servers[node].start()
    (cli.folder / "go").touch()
    (cli.folder / "go2").touch()
    assert cli.run("workflow", "submit", "stages-1", "--wait").code == 0
