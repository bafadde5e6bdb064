"""`workflow stacks` names the rank that is in another function than the others, and `hang_timeout` reports silent gangs."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from distflow.testing.waiting import wait_until
from scenarios.conftest import Cli
from scenarios.lab import Lab

HANGS = """
workflow:
  name: hangs
  groups:
  - name: train
    tasks:
    - name: master
      lead: true
      ranks: {size: 2}
      command: [sh, -c, 'RANK=0 python3 /train.py & RANK=1 python3 /train.py & wait']
      files: &files
      - path: /train.py
        contents: |
          import os, time

          def all_reduce():
              print("there", flush=True)
              time.sleep(600)

          def load_batch():
              print("there", flush=True)
              time.sleep(600)

          load_batch() if os.environ["RANK"] == "3" else all_reduce()
    - name: worker
      ranks: {size: 2}
      command: [sh, -c, 'RANK=2 python3 /train.py & RANK=3 python3 /train.py & wait']
      files: *files
"""


def test_stacks_name_the_rank_that_is_in_another_function(lab: Lab) -> None:
    cli: Cli = lab.cli
    workflow = cli.submit(cli.spec(HANGS))
    cli.await_running(workflow)
    lab.cli.await_log(workflow, "there", 4)
    done = cli.run("workflow", "stacks", workflow)
    assert done.code == 0, done.err
    assert "3 processes here: master on " in done.out
    assert "all_reduce (" in done.out
    last = done.out.splitlines()[-1]
    assert last.startswith("different from most: worker on ")
    assert last.endswith(", rank 3)")
    worker = json.loads(cli.run("workflow", "stacks", workflow, "--task", "worker", "--format-type", "json").out)
    assert [task["task"] for task in worker["tasks"]] == ["worker"]
    node = worker["tasks"][0]["node"]
    lab.servers[node].stop()
    partial = cli.run("workflow", "stacks", workflow)
    assert partial.code == 0
    assert "worker: no stacks: " in partial.out
    lab.servers[node].start()
    assert cli.run("workflow", "cancel", workflow, "--force", "--wait", "60").code == 0
    ended = cli.run("workflow", "stacks", workflow)
    assert ended.code == 2
    assert "no task of hangs-1 is running; the status of the workflow is " in ended.err


SILENT = """
workflow:
  name: silent
  timeout: {hang_timeout: 2s}
  tasks:
  - {name: one, command: [sh, -c, 'echo begins; sleep 4; while [ ! -e GO ]; do sleep 0.2; done; echo continues; sleep 1']}
"""


def test_a_gang_that_may_hang_is_reported_and_not_ended(cli: Cli) -> None:
    go = cli.folder / "go"
    workflow = cli.submit(cli.spec(SILENT.replace("GO", str(go))))
    message = "one-group: may hang: no task has printed anything or sent a heartbeat for 2 s (hang_timeout); "
    message += "to show the stacks of its processes: "
    cli.await_event(workflow, message)
    assert "may hang" in cli.run("workflow", "query", workflow).out
    go.touch()
    cli.await_status(workflow, "COMPLETED")


BEATS = """
workflow:
  name: beats
  timeout: {hang_timeout: 6s}
  tasks:
  - name: one
    command: [python3, beats.py]
    files:
    - path: beats.py
      contents: |
        import os, time

        until = time.monotonic() + 10
        while time.monotonic() < until:
            open(os.environ["DISTFLOW_HEARTBEAT"], "w").close()
            time.sleep(0.1)
        open("MARK", "w").close()
        time.sleep(600)
"""


def test_a_heartbeat_prevents_the_report_of_a_hang_until_it_stops(cli: Cli) -> None:
    cli.configure(ping="1s")
    mark = cli.folder / "mark"
    workflow = cli.submit(cli.spec(BEATS.replace("MARK", str(mark))))
    wait_until(mark.exists, 60)
    # The task has printed nothing for 10 s, and `hang_timeout` is 6 s.
    assert "may hang" not in cli.run("workflow", "events", workflow).out
    assert cli.logs(workflow) == ""
    cli.await_event(workflow, "may hang")
    assert cli.run("workflow", "cancel", workflow, "--force", "--wait", "60").code == 0


RANKS = """
workflow:
  name: ranks
  groups:
  - name: train
    launcher: spawn
    tasks:
    - name: one
      lead: true
      ranks: {size: 2}
      command: [python3, /train.py]
      files:
      - path: /train.py
        contents: |
          import time
          from distflow import train

          def load_batch():
              train.report(step=1)
              time.sleep(600)

          def compute():
              train.report(step=1)
              time.sleep(600)

          load_batch() if train.init().rank == 1 else compute()
"""


@pytest.mark.torch
def test_stacks_of_distflow_train_need_no_py_spy(cli: Cli, forking_site: str) -> None:
    if sys.prefix == sys.base_prefix:
        pytest.skip("py-spy may be next to this Python: only a virtual environment can be copied without it")
    # The same virtual environment, without its programs.
    bare = cli.folder / "venv"
    (bare / "bin").mkdir(parents=True)
    (bare / "bin" / "python3").symlink_to(Path(sys.executable).resolve())
    (bare / "lib").symlink_to(Path(sys.prefix) / "lib")
    (bare / "pyvenv.cfg").write_text((Path(sys.prefix) / "pyvenv.cfg").read_text())
    cli.configure(python=bare / "bin" / "python3", environment=f"{{PATH: /usr/bin:/bin, PYTHONPATH: {forking_site}}}")
    workflow = cli.submit(cli.spec(RANKS))
    wait_until(lambda: cli.logs(workflow).count('"step": 1') == 2, 120)
    stacks = json.loads(cli.run("workflow", "stacks", workflow, "--format-type", "json").out)["tasks"][0]
    if stacks["tool"]:
        cli.run("workflow", "cancel", workflow, "--force", "--wait", "60")
        pytest.skip("the node's own PATH has py-spy")

    def is_shown() -> bool:  # a rank that has reported may not have reached its next line
        shown = cli.run("workflow", "stacks", workflow).out
        is_loading = ", rank 1)\n    load_batch (train.py:6)\n    <module> (train.py:12)\n" in shown
        return is_loading and ", rank 0)\n    compute (train.py:10)\n" in shown

    wait_until(is_shown, 60)
    assert cli.tasks(workflow)["one"]["status"] == "RUNNING"
    assert cli.run("workflow", "cancel", workflow, "--force", "--wait", "60").code == 0


COLLECTIVES = """
workflow:
  name: collectives
  groups:
  - name: train
    launcher: spawn
    tasks:
    - name: one
      lead: true
      ranks: {size: 3}
      command: [python3, /train.py]
      files:
      - path: /train.py
        contents: |
          import time
          import torch
          import torch.distributed as dist
          from distflow import train

          place = train.init()
          dist.all_reduce(torch.ones(2))
          train.report(step=1)
          if place.rank == 1:
              time.sleep(600)
          dist.all_reduce(torch.ones(2))
"""


@pytest.mark.torch
def test_the_rank_that_others_wait_for_in_a_collective_is_named(cli: Cli, forking_site: str) -> None:
    cli.configure(environment={"PYTHONPATH": forking_site})
    workflow = cli.submit(cli.spec(COLLECTIVES))
    wait_until(lambda: cli.logs(workflow).count('"step": 1') == 3, 120)
    waiting = "in all_reduce, collective 2: ranks 0, 2\n"
    wait_until(lambda: waiting in cli.run("workflow", "stacks", workflow).out, 60)
    shown = cli.run("workflow", "stacks", workflow).out
    assert f"process group 0 default_pg, ranks 0-2\n    {waiting}    after all_reduce, collective 1: rank 1\n" in shown
    assert "\n  ranks 0, 2 wait in all_reduce for rank 1 (one on local)\n" in shown
    (task,) = json.loads(cli.run("workflow", "stacks", workflow, "--format-type", "json").out)["tasks"]
    assert [(one["rank"], one["groups"][0]["entered"]) for one in task["collectives"]] == [(0, 2), (1, 1), (2, 2)]
    assert cli.tasks(workflow)["one"]["status"] == "RUNNING"
    assert cli.run("workflow", "cancel", workflow, "--force", "--wait", "60").code == 0
