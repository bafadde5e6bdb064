"""The first cause of a failure on SSH hosts: wrong clocks, killed ranks, exceptions, and memory that runs out."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from distflow.testing.kernel import MemoryCgroup, missing_cgroups
from distflow.testing.nodes import write_skewed_python
from distflow.testing.waiting import wait_until
from scenarios.conftest import Cli
from scenarios.lab import Lab, copy_specs, json_lines

pytestmark = pytest.mark.ssh

TWO = """
workflow:
  name: two
  resources: {default: {}, second: {nodesExcluded: [gpu1]}}
  groups:
  - name: train
    tasks:
    - name: master
      lead: true
      ranks: {size: 1}
      command: [sh, -c, 'while [ ! -e FOLDER/second ]; do sleep 0.2; done; sleep 2; echo "as innocent as it gets"; exit 4']
    - name: worker
      resource: second
      ranks: {size: 1}
      command: [sh, -c, 'while [ ! -e FOLDER/first ]; do sleep 0.2; done; echo "it was me"; exit 3']
"""
"""Two tasks on two hosts, which fail by themselves on request; the master later than the uncertainty of the clocks."""

RAISES = """
workflow:
  name: raises
  resources: {default: {gpu: 0}}
  groups:
  - name: train
    tasks:
    - name: master
      lead: true
      command: [torchrun, --nnodes, "2", --nproc_per_node, "1", --node_rank, "{{node_rank}}"]
      args: &args [--master_addr, "{{master_addr}}", --master_port, "{{master_port}}", --no_python, python3, /train]
      ranks: {size: 1}
      files: &files
      - path: /train
        contents: |
          import os
          import torch.distributed as dist
          from torch.distributed.elastic.multiprocessing.errors import record
          @record
          def main():
              dist.init_process_group("gloo")
              print("ready", flush=True)
              if dist.get_rank() == 2:
                  raise ValueError(f"bad label, says process {os.getpid()}")
              dist.barrier()
          main()
    - name: worker
      command: [torchrun, --nnodes, "2", --nproc_per_node, "2", --node_rank, "{{node_rank}}"]
      args: *args
      ranks: {size: 2}
      files: *files
"""
"""With the fixture `forking_site`, only torchrun is forked: the ranks run a file without `.py`, and end as slowly as usual."""

PLAIN = """
workflow:
  name: plain
  resources: {default: {gpu: 0}}
  groups:
  - name: train
    launcher: torchrun
    tasks:
    - name: master
      lead: true
      ranks: {size: 1}
      command: &train [python3, /train]
      files: &files
      - path: /train
        contents: |
          import torch.distributed as dist
          dist.init_process_group("gloo")
          print("ready", flush=True)
          if dist.get_rank() == 2:
              raise RuntimeError("bad batch 17")
          dist.barrier()
    - {name: worker, ranks: {size: 2}, command: *train, files: *files}
"""
"""A script without the decorator ``@record``. With `PYTHON_EXEC`, a forked torchrun starts its ranks as new interpreters."""


def _why(cli: Cli, workflow: str) -> dict[str, Any]:
    done = cli.run("workflow", "why", workflow, "-t", "json")
    assert done.code == 0, done.err
    (group,) = json.loads(done.out)["groups"]
    assert isinstance(group, dict)
    return group


def _offset_of(why: dict[str, Any], task: str, text: str) -> float:
    return float(next(one["offset_s"] for one in why["timeline"] if one["task"] == task and one["text"].startswith(text)))


def _exit_files(host: Path) -> list[Path]:
    return list(host.glob("**/train/*/0/exit.json"))


def _is_zombie(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"


def test_the_first_to_fail_is_named_though_the_clock_of_the_other_is_behind(lab: Lab) -> None:
    """By the nodes' own times, the master ended 100 s before the worker; no supervisor runs while both end."""
    cli = lab.cli
    folder = cli.folder
    late, early = (
        write_skewed_python(folder / name, offset_s) for name, offset_s in (("late-python", -60.0), ("early-python", 40.0))
    )
    lab.configure(names=("gpu1", "gpu2"), nodes={"gpu1": {"python": late}, "gpu2": {"python": early}})
    workflow = cli.submit(cli.spec(TWO.replace("FOLDER", str(folder))))
    cli.await_running(workflow)
    cli.kill_supervisor()
    # While its keeper is stopped, the master's node does not know that the worker has failed, so the master fails by itself.
    (path,) = (folder / "gpu1").glob("**/train/master/0/runner.json")
    state = json.loads(path.read_text())
    os.kill(state["keeper"]["pid"], signal.SIGSTOP)
    (folder / "first").touch()
    wait_until(lambda: _exit_files(folder / "gpu2"), 30)
    (folder / "second").touch()
    wait_until(lambda: _is_zombie(state["command"]["pid"]), 30)
    os.kill(state["keeper"]["pid"], signal.SIGCONT)
    wait_until(lambda: _exit_files(folder / "gpu1"), 30)
    end_times = [json.loads(path.read_text())["ended_at"] for host in ("gpu1", "gpu2") for path in _exit_files(folder / host)]
    assert end_times[0] < end_times[1] - 50, "by the nodes' own clocks, the master ended first"

    answer = cli.await_status(workflow, "FAILED")
    cause = answer["groups"][0]["first_cause"]
    assert (cause["task"], cause["node"], cause["exit_code"], cause["rivals"]) == ("worker", "gpu2", 3, [])
    assert cause["lines"] == ["it was me"]
    why = _why(cli, workflow)
    offsets = {one["node"]: one["offset_s"] for one in why["clocks"]}
    assert {node: round(offset) for node, offset in offsets.items()} == {"gpu1": -60, "gpu2": 40}
    assert 0 < _offset_of(why, "master", "ended: exit code 4") < 50
    assert _offset_of(why, "master", "started") < 0
    shown = cli.run("workflow", "why", workflow).out
    # On a busy machine, even the fastest ping may be slow, so the measured offset is not exactly 60 s.
    assert f"Clock of gpu1: {-offsets['gpu1']:.1f} s behind this machine's" in shown
    assert "| it was me" in shown
    assert f"details: distflow workflow why {workflow}" in cli.run("workflow", "query", workflow).out


@pytest.mark.torch
def test_a_rank_that_is_killed_is_named_with_its_process(lab: Lab, repository: Path, forking_site: str) -> None:
    cli = lab.cli
    lab.configure(environment={"PYTHONPATH": forking_site})
    specs = copy_specs(cli, repository)
    workflow = cli.submit(str(specs / "pytorch_dist.yaml"), "--set", "epochs=1000000", "size=2")
    wait_until(lambda: any("loss" in row for row in json_lines(cli.logs(workflow))), 120)
    ranks = {row["rank"]: row["pid"] for row in json_lines(cli.logs(workflow)) if row.get("event") == "started"}
    victim = max(ranks)
    os.kill(ranks[victim], signal.SIGKILL)
    answer = cli.await_status(workflow, "FAILED")
    cause = answer["groups"][0]["first_cause"]
    assert (cause["task"], cause["ranks"], cause["pid"]) == ("worker", str(victim), ranks[victim])
    assert f"rank {victim} was killed by SIGKILL" in cause["message"]
    assert _why(cli, workflow)["timeline"]


@pytest.mark.torch
def test_an_exception_under_torchrun_is_reported_with_its_rank_and_traceback(lab: Lab, forking_site: str) -> None:
    cli = lab.cli
    lab.configure(environment={"PYTHONPATH": forking_site})
    workflow = cli.submit(cli.spec(RAISES))
    answer = cli.await_status(workflow, "FAILED", timeout=120)
    cause = answer["groups"][0]["first_cause"]
    assert (cause["task"], cause["ranks"]) == ("worker", "2"), (cause, cli.logs(workflow))
    if cause["message"].startswith("failed before it was stopped"):  # on a slow machine, before torchrun reported the rank
        assert re.fullmatch(r"failed before it was stopped: ValueError: bad label, says process \d+", cause["message"])
    else:
        assert cause["exit_code"] == 1
        assert cause["message"] == f"exit code 1: ValueError: bad label, says process {cause['pid']}"
    assert cause["traceback"].startswith("Traceback (most recent call last):")
    assert cause["traceback"].splitlines()[-1].startswith("ValueError: bad label")
    master = cli.tasks(workflow)["master"]
    because = next(
        one["because"] for one in _why(cli, workflow)["timeline"] if one["task"] == "master" and one["text"].startswith("ended")
    )
    assert because == ("worker failed" if master["reason"] == "PEER_FAILED" else "it reports that a peer was gone")


@pytest.mark.torch
def test_an_exception_of_a_script_without_record_is_named_with_its_rank_and_traceback(lab: Lab, forking_site: str) -> None:
    cli = lab.cli
    lab.configure(python=sys.executable, environment={"PYTHONPATH": forking_site, "PYTHON_EXEC": "python3"})
    workflow = cli.submit(cli.spec(PLAIN))
    cause = cli.await_status(workflow, "FAILED", timeout=120)["groups"][0]["first_cause"]
    assert (cause["task"], cause["ranks"]) == ("worker", "2"), (cause, cli.logs(workflow))
    # The other node's torchrun may stop the gang before this one has ended by itself.
    how = "failed before it was stopped" if cause["message"].startswith("failed before") else "exit code 1"
    assert cause["message"] == f"{how}: RuntimeError: bad batch 17"
    assert cause["traceback"].splitlines()[-1] == "RuntimeError: bad batch 17"
    assert not any("ChildFailedError" in line for line in cause["lines"])
    shown = cli.run("workflow", "query", workflow).out
    assert f"rank 2: {how}: RuntimeError: bad batch 17" in shown
    assert not any(task["last_line"].startswith("====") for task in cli.tasks(workflow).values())
    assert "Traceback   | Traceback (most recent call last):" in cli.run("workflow", "why", workflow).out
    diagnosis = cli.run("workflow", "diagnose", workflow).out
    assert "rank 2 (worker on gpu" in diagnosis
    assert "raised RuntimeError: bad batch 17 (" in diagnosis
    assert "not known" not in diagnosis


@pytest.fixture
def memory_limit() -> Iterator[MemoryCgroup]:
    if why := missing_cgroups():
        pytest.skip(why)
    made = MemoryCgroup(64 << 20)
    yield made
    made.close()


def test_a_task_that_runs_out_of_memory_is_reported_from_the_kernel_log(lab: Lab, memory_limit: MemoryCgroup) -> None:
    cli = lab.cli
    eats = f'echo $$ > {memory_limit.procs}; exec python3 -c "x = bytearray(400 << 20)"'
    spec = TWO.replace('while [ ! -e FOLDER/first ]; do sleep 0.2; done; echo "it was me"; exit 3', eats)
    workflow = cli.submit(cli.spec(spec))
    answer = cli.await_status(workflow, "FAILED_EVICTED")
    cause = answer["groups"][0]["first_cause"]
    assert (cause["task"], cause["reason"], cause["signal"]) == ("worker", "OOM_KILLED", signal.SIGKILL)
    assert cause["pid"] == cli.tasks(workflow)["worker"]["pid"]
    assert f"Killed process {cause['pid']} (python3)" in cause["kernel"][-1]
    assert cli.tasks(workflow)["master"]["reason"] == "PEER_FAILED"
    assert cli.tasks(workflow)["worker"]["exit_code"] == 3004
    assert "  Kernel      | oom-kill:" in cli.run("workflow", "why", workflow).out
