"""Groups that depend on other groups, and the outputs that tasks pass to them, with real processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Any

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


def test_a_failure_ends_only_the_groups_that_depend_on_it(cli: Cli) -> None:
    done = cli.run("workflow", "submit", cli.spec(CHAIN.format(prepare="exit 3")), "--wait")
    assert done.code == 1
    tasks = cli.tasks("chain-1")
    assert {name: task["status"] for name, task in tasks.items()} == {
        "prepare": "FAILED", "train": "FAILED_UPSTREAM", "rate": "FAILED_UPSTREAM", "aside": "COMPLETED",
    }  # fmt: skip
    shown = cli.run("workflow", "query", "chain-1").out
    assert "upstream group train-group did not complete: FAILED_UPSTREAM" in shown
    assert cli.query("chain-1")["status"] == "FAILED"


def test_waiting_groups_run_after_the_supervisor_was_killed(cli: Cli) -> None:
    spec = cli.spec(CHAIN.format(prepare="while ! test -e ../../../../../go; do sleep 0.2; done"))
    ident = cli.submit(spec)
    wait_until(lambda: cli.tasks(ident)["prepare"]["status"] == "RUNNING", 60)
    group = next(one for one in cli.query(ident)["groups"] if one["name"] == "train-group")
    assert (group["status"], group["message"], group["remaining_upstream_groups"], group["downstream_groups"]) == (
        "WAITING", "waits for prepare-group", ["prepare-group"], ["rate-group"],
    )  # fmt: skip
    cli.kill_supervisor()
    (cli.root / "go").touch()
    cli.await_status(ident, "COMPLETED")
    assert {task["status"] for task in cli.tasks(ident).values()} == {"COMPLETED"}


def test_a_cancel_ends_waiting_tasks(cli: Cli) -> None:
    ident = cli.submit(cli.spec(CHAIN.format(prepare="sleep 600")))
    wait_until(lambda: cli.tasks(ident)["prepare"]["status"] == "RUNNING", 60)
    assert cli.run("workflow", "cancel", ident, "--wait", "60").code == 0
    assert {name: task["status"] for name, task in cli.tasks(ident).items() if name != "aside"} == dict.fromkeys(
        ("prepare", "train", "rate"), "FAILED_CANCELED"
    )


def test_the_dry_run_and_validate_show_dependencies(cli: Cli) -> None:
    spec = cli.spec(CHAIN.format(prepare="true"))
    assert "group train-group: 1 task, waits for prepare-group" in cli.run("workflow", "submit", spec, "--dry-run").out
    assert "  train-group waits for prepare-group\n" in cli.run("workflow", "validate", spec).out
    plan = json.loads(cli.run("workflow", "submit", spec, "--dry-run", "-t", "json").out)
    assert [group["upstream_groups"] for group in plan["groups"]] == [[], ["prepare-group"], ["train-group"], []]


PIPELINE = """
workflow:
  name: pipeline
  groups:
  - name: preparation
    tasks:
    - name: crop
      lead: true
      command:
      - sh
      - -c
      - 'mkdir "$1/raw"; echo one > "$1/raw/1.txt"; echo two > "$1/2.txt"; head -c {bytes} /dev/urandom > "$1/big"'
      - sh
      - "{{{{output}}}}"
    - {{name: empty, command: ["true"]}}
  - name: training
    tasks:
    - name: train
      command:
      - sh
      - -c
      - 'cat "$1/raw/1.txt" "$1/2.txt"; wc -c < "$1/big"; ls "$2"; ls -A "$3" | wc -l; cp "$1/2.txt" "$4/model"'
      - sh
      - "{{{{input:0}}}}"
      - "{{{{input:1}}}}"
      - "{{{{input:empty}}}}"
      - "{{{{output}}}}"
      inputs:
      - {{task: crop}}
      - {{task: crop, regex: 'raw/.*'}}
      - {{task: empty}}
  - name: rating
    tasks:
    - {{name: rate, command: [cat, "{{{{input:train}}}}/model"], inputs: [{{task: train}}]}}
"""


def test_a_task_gets_the_outputs_of_other_tasks(cli: Cli) -> None:
    done = cli.run("workflow", "submit", cli.spec(PIPELINE.format(bytes=3_000_000)), "--wait")
    assert done.code == 0, done.err + cli.run("workflow", "events", "pipeline-1").out
    ident = "pipeline-1"
    assert cli.logs(ident, "--task", "train").replace("[train]", "").split() == ["one", "two", "3000000", "raw", "0"]
    assert cli.logs(ident, "--task", "rate").replace("[rate]", "").split() == ["two"]
    events = cli.run("workflow", "events", ident).out
    assert (
        events.index("[crop] its output is available on every node: ")
        < events.index("preparation: COMPLETED")
        < events.index("training: SCHEDULING")
    )
    # The state directory keeps no copy of the outputs.
    wait_until(lambda: not list((cli.state / "blobs").iterdir()), 20)
    folder = Path(cli.tasks(ident)["train"]["output_dir"]).parent / "input" / "0"
    assert (folder / "big").stat().st_mode & 0o777 == 0o600
    assert folder.stat().st_mode & 0o777 == 0o700


def test_an_output_with_a_link_to_another_directory_fails_its_group(cli: Cli) -> None:
    spec = CHAIN.format(prepare='ln -s /usr "$DISTFLOW_OUTPUT/data"')
    done = cli.run("workflow", "submit", cli.spec(spec), "--wait")
    assert done.code == 1
    shown = cli.run("workflow", "query", "chain-1").out
    assert (
        "First cause: prepare on local: its output cannot be passed on: the link `data` in the task's output points to `/usr`"
        in shown
    )
    assert "copy the directory, or remove the link" in shown
    group = cli.query("chain-1")["groups"][0]
    assert (group["status"], group["reason"]) == ("FAILED", "DATA")
    assert {name: task["status"] for name, task in cli.tasks("chain-1").items()} == {
        "prepare": "COMPLETED", "train": "FAILED_UPSTREAM", "rate": "FAILED_UPSTREAM", "aside": "COMPLETED",
    }  # fmt: skip


def test_the_dry_run_shows_inputs_and_its_scripts_take_them_from_variables(cli: Cli) -> None:
    spec = cli.spec(PIPELINE.format(bytes=10))
    shown = cli.run("workflow", "submit", spec, "--dry-run").out
    assert "inputs       output of crop → <ATTEMPT_DIR>/input/0" in shown
    assert "output of crop (only raw/.*) → <ATTEMPT_DIR>/input/1" in shown
    assert cli.run("workflow", "submit", spec, "--dry-run", "--scripts", "by-hand").code == 0
    model = cli.folder / "model-dir"
    model.mkdir()
    (model / "model").write_text("by hand\n")
    script = ["sh", str(cli.folder / "by-hand" / "rate.sh")]
    done = subprocess.run(script, env=os.environ | {"INPUT_0": str(model)}, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "by hand\n"), done.stderr


def test_a_cancel_while_an_output_is_copied_leaves_no_blobs(cli: Cli) -> None:
    # While the process that packs and sends the output is suspended, no data arrives.
    ident = cli.submit(cli.spec(CHAIN.format(prepare="head -c 300000000 /dev/zero > {{output}}/big")))
    wait_until(lambda: _senders(cli), 60)
    (sender,) = _senders(cli)
    os.kill(sender, signal.SIGSTOP)
    message = "all tasks have ended; copying the output of prepare to this machine for waiting groups"
    try:
        wait_until(lambda: message in str(_group(cli, ident)["message"]), 20)
        assert _group(cli, ident)["status"] == "RUNNING"
        assert cli.run("workflow", "cancel", ident, "--wait", "30").code == 0
        assert cli.query(ident)["status"] == "FAILED_CANCELED"
    finally:
        os.kill(sender, signal.SIGCONT)
    wait_until(lambda: cli.supervisor() is None, 30)
    assert not list((cli.state / "blobs").iterdir())


def _senders(cli: Cli) -> list[int]:
    found = []
    for pid, _ in cli.processes():
        with suppress(OSError):  # the process has just ended
            found += [pid] if Path(f"/proc/{pid}/comm").read_text().strip() == "df-sender" else []
    return found


def _group(cli: Cli, ident: str) -> dict[str, Any]:
    """Return the group of ``prepare`` from ``workflow query``."""
    return next(one for one in cli.query(ident)["groups"] if one["name"] == "prepare-group")
