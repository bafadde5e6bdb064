"""Gangs that fail in known ways, and the causes and remedies that ``workflow diagnose`` prints."""

from __future__ import annotations

import json
from typing import Any

import pytest

from distflow.testing.waiting import wait_until
from scenarios.conftest import Cli
from scenarios.lab import Lab

pytestmark = [pytest.mark.torch, pytest.mark.timeout(300)]

JOIN = """
import datetime, os, signal, sys, threading
import torch
import torch.distributed as dist
seconds = float(sys.argv[2]) if len(sys.argv) > 2 else 60.0
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=seconds))
rank, how = dist.get_rank(), sys.argv[1]
if how == "differ":
    dist.all_reduce(torch.ones(2, 3)) if rank == 0 else dist.broadcast(torch.ones(2, 3), 0)
if how == "die" and rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
dist.all_reduce(torch.ones(1))
"""
FAULTS = """
workflow:
  name: faults
  resources: {default: {gpu: 0}}
  groups:
  - name: differ
    debug: true
    tasks:
    - name: differ-0
      lead: true
      ranks: {size: 1}
      command: [python3, /join.py, differ]
      environment: &environment {PYTHONPATH: SITE}
      files: &files [{path: /join.py, localpath: join.py}]
    - {name: differ-1, ranks: {size: 1}, command: [python3, /join.py, differ], environment: *environment, files: *files}
  - name: die
    tasks:
    - {name: die-0, lead: true, ranks: {size: 1}, command: [python3, /join.py, die], files: *files}
    - {name: die-1, ranks: {size: 1}, command: [python3, /join.py, die], files: *files}
  - name: absent
    tasks:
    - name: absent-0
      lead: true
      ranks: {size: 1}
      command: [python3, /join.py, meet, "3"]
      environment: *environment
      files: *files
    - {name: absent-1, ranks: {size: 1}, command: [sleep, "600"]}
  - name: module
    tasks:
    - {name: module-0, command: [python3, -c, import apex_of_nothing]}
  - name: command
    tasks:
    - {name: command-0, command: [sh, -c, trainn --epochs 3]}
  - name: silent
    timeout: {hang_timeout: 2s, exec_timeout: 6s}
    tasks:
    - {name: silent-0, command: [sh, -c, 'echo step 1; sleep 600']}
  - name: unknown
    tasks:
    - {name: unknown-0, command: [sh, -c, 'echo the moon is in the wrong phase; exit 3']}
"""


def diagnoses_of(cli: Cli, workflow: str, *arguments: str) -> dict[str, dict[str, Any]]:
    """Return the diagnoses of each group by its name."""
    done = cli.run("workflow", "diagnose", workflow, "-t", "json", *arguments)
    assert done.code == 0, done.err
    return {group["name"]: group for group in json.loads(done.out)["groups"]}


def test_each_fault_of_a_gang_is_reported_with_its_remedy(cli: Cli, forking_site: str) -> None:
    (cli.folder / "join.py").write_text(JOIN)
    workflow = cli.submit(cli.spec(FAULTS.replace("SITE", forking_site)))
    cli.await_status(workflow, "FAILED", "FAILED_EXEC_TIMEOUT", timeout=150)
    groups = diagnoses_of(cli, workflow)
    keys = {name: [one["key"] for one in group["diagnoses"]] for name, group in groups.items()}
    # The other rank may be stopped before or after it reports that it lost its peer.
    keys["die"] = keys["die"][:1]
    assert keys == {
        "differ": ["collective-mismatch"], "die": ["killed"], "absent": ["rank-missing"],
        "module": ["module-missing"], "command": ["file-missing"], "silent": ["too-long", "hang"], "unknown": [],
    }  # fmt: skip
    found = {name: " / ".join(one["found"] for one in group["diagnoses"]) for name, group in groups.items()}
    assert "rank 0 (differ-0 on local) called allreduce of shape [2, 3]" in found["differ"]
    assert "rank 1 (differ-1 on local) called broadcast of shape [2, 3]" in found["differ"]
    assert found["die"].startswith("rank 1 (die-1 on local) was ended by SIGKILL")
    assert found["absent"].startswith("rank 1 (absent-1 on local) did not arrive")
    assert "apex_of_nothing" in found["module"]
    assert "trainn" in found["command"]
    assert "no task has printed anything or sent a heartbeat for 2 s" in found["silent"]

    text = cli.run("workflow", "diagnose", workflow).out
    assert "Cause   ranks called different collectives" in text
    assert f"distflow workflow logs {workflow} --task unknown-0" in text
    assert f"distflow workflow diagnose {workflow}" in cli.run("workflow", "why", workflow).out

    assert list(diagnoses_of(cli, workflow, "--task", "module-0")) == ["module"]


INTERFACE = """
workflow:
  name: interface
  resources: {default: {gpu: 0}}
  groups:
  - name: train
    tasks:
    - name: master
      lead: true
      ranks: {size: 1}
      command: &join [sh, -c, 'unset GLOO_SOCKET_IFNAME; exec python3 /join.py meet 10']
      environment: &environment {PYTHONPATH: SITE}
      files: &files [{path: /join.py, localpath: join.py}]
    - {name: worker, ranks: {size: 1}, command: *join, environment: *environment, files: *files}
"""


@pytest.mark.ssh
def test_an_address_that_only_its_own_node_reaches_is_reported(far_lab: Lab, forking_site: str) -> None:
    """Each host's own name resolves to 127.0.1.1, and the script unsets the interface that distflow has chosen."""
    cli = far_lab.cli
    (cli.folder / "join.py").write_text(JOIN)
    workflow = cli.submit(cli.spec(INTERFACE.replace("SITE", forking_site)))
    cli.await_status(workflow, "FAILED", timeout=150)
    (one,) = diagnoses_of(cli, workflow)["train"]["diagnoses"]
    assert one["key"] == "wrong-interface"
    assert one["found"].endswith("got 127.0.1.1 as the address of a rank on another node")
    assert "GLOO_SOCKET_IFNAME" in one["remedy"]


HIDDEN_FAILURE = """
workflow:
  name: hidden
  groups:
  - name: train
    tasks:
    - {name: master, lead: true, ranks: {size: 1}, command: [sh, -c, 'echo waits; sleep 600']}
    - name: worker
      ranks: {size: 1}
      command: [sh, -c, 'python3 train.py; exit 0']
      files: [{path: train.py, contents: 'raise ValueError("MASTER_ADDR is empty")'}]
"""


def test_failed_ranks_are_reported_although_their_task_exits_with_0(cli: Cli) -> None:
    workflow = cli.submit(cli.spec(HIDDEN_FAILURE))
    message = (
        "worker ended with exit code 0 although its ranks failed (ValueError: MASTER_ADDR is empty); master waits for rank 1"
    )
    wait_until(lambda: message in cli.run("workflow", "query", workflow).out, 60)
    assert message in cli.run("workflow", "why", workflow).out
    shown = cli.run("workflow", "diagnose", workflow).out
    assert "raised ValueError: MASTER_ADDR is empty (" in shown
    assert "a script did not pass on the exit code of its ranks" in shown
    answer = cli.await_status(workflow, "FAILED", timeout=90)
    cause = answer["groups"][0]["first_cause"]
    assert (cause["task"], cause["ranks"], cause["exit_code"]) == ("worker", "1", 0)
    assert cause["traceback"].endswith("ValueError: MASTER_ADDR is empty")
    assert cli.tasks(workflow)["master"]["reason"] == "PEER_FAILED"
    assert "exit code 0 although its ranks failed" in cli.run("workflow", "why", workflow).out
    assert "a script did not pass on" in cli.run("workflow", "diagnose", workflow).out
