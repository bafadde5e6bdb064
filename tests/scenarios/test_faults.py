"""``kill -9`` of tasks, their keepers and runners, agents and supervisors: gangs end completely, or continue without loss."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from distflow.testing.waiting import wait_until
from scenarios.conftest import Cli

GANG = """
workflow:
  name: gang
  groups:
  - name: train
    tasks:
    - name: master
      lead: true
      ranks: {size: 1}
      command: [sh, -c, 'echo master ready; sleep 600 & wait']
    - name: worker
      ranks: {size: 1}
      command: [sh, -c, 'echo worker ready; sleep 600 & wait']
"""

SHORT = """
workflow:
  name: short
  groups:
  - name: train
    tasks:
    - name: master
      lead: true
      ranks: {size: 1}
      command: [sh, -c, 'i=0; while [ $i -lt 40 ]; do echo line $i; i=$((i+1)); sleep 0.1; done; echo master done']
    - name: worker
      ranks: {size: 1}
      command: [sh, -c, 'sleep 3; echo worker done; exit 0']
"""

DAEMONS = """
workflow:
  name: daemons
  groups:
  - name: train
    tasks:
    - name: master
      lead: true
      ranks: {size: 1}
      command:
      - python3
      - -c
      - |
        import os, signal, sys, time
        marker = sys.argv[1]
        for _ in range(4):
            if os.fork() == 0:
                os.setsid()
                if os.fork() == 0:
                    signal.signal(signal.SIGTERM, signal.SIG_IGN)
                    code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
                    os.execve(sys.executable, [sys.executable, "-c", code, marker], {})
                os._exit(0)
        print("daemons away", flush=True)
        time.sleep(600)
      - MARKER
    - name: worker
      ranks: {size: 1}
      command: [sh, -c, 'echo worker ready; sleep 600']
"""


def _pids_with(marker: str) -> list[int]:
    """Return the pids of the processes whose command line contains ``marker``."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
                if marker.encode() in (entry / "cmdline").read_bytes() and state != "Z":
                    found.append(int(entry.name))
            except OSError:
                continue
    return found


def _pids_of_task(cli: Cli, workflow: str, task: str) -> dict[str, int]:
    """The pids of a task's command, keeper and runner."""
    record = cli.tasks(workflow)[task]
    pid = int(record["pid"])
    keeper = _parent(pid)
    return {"command": pid, "keeper": keeper, "runner": _parent(keeper)}


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def _agent(cli: Cli) -> int:
    agents = [pid for pid, command in cli.processes() if " -I -S -c " in command and "DISTFLOW_ATTEMPT" not in command]
    supervisor = cli.supervisor()
    return next(pid for pid in agents if _parent(pid) == supervisor)


@pytest.mark.parametrize("victim", ["command", "keeper", "runner"])
def test_a_killed_process_ends_the_gang_and_is_named(cli: Cli, victim: str) -> None:
    workflow = cli.submit(cli.spec(GANG))
    cli.await_running(workflow)
    cli.await_log(workflow, "worker ready")
    os.kill(_pids_of_task(cli, workflow, "worker")[victim], signal.SIGKILL)
    answer = cli.await_status(workflow, "FAILED", "FAILED_SERVER_ERROR")
    cause = answer["groups"][0]["first_cause"]
    assert cause["task"] == "worker"
    if victim == "command":
        assert cause["signal"] == signal.SIGKILL
    tasks = cli.tasks(workflow)
    assert tasks["master"]["reason"] == "PEER_FAILED"
    assert "worker ready" in cli.logs(workflow)


@pytest.mark.parametrize("seed", range(3))
def test_a_gang_completes_although_supervisors_and_agents_are_killed(cli: Cli, seed: int) -> None:
    dice = random.Random(seed)
    workflow = cli.submit(cli.spec(SHORT))
    victims: list[Callable[[], int | None]] = [cli.supervisor, lambda: _agent(cli)]
    for _ in range(3):
        try:
            pid = dice.choice(victims)()
            if pid is not None:
                os.kill(pid, signal.SIGKILL)
        except (StopIteration, FileNotFoundError, ProcessLookupError):
            continue  # the process has ended, and the next one has not started yet
        # If a workflow is unfinished, each command starts a supervisor again.
        cli.query(workflow)
    cli.await_status(workflow, "COMPLETED")
    tasks = cli.tasks(workflow)
    assert [task["exit_code"] for task in tasks.values()] == [0, 0]
    log = cli.logs(workflow, "--task", "master")
    assert [line for line in log.splitlines() if "line" in line][-1].endswith("line 39")
    assert sum("line " in line for line in log.splitlines()) == 40
    assert sum("started on" in line for line in cli.run("workflow", "events", workflow).out.splitlines()) == 2


def test_a_failure_without_a_supervisor_is_read_from_the_node(cli: Cli) -> None:
    workflow = cli.submit(cli.spec(SHORT.replace("exit 0", "exit 5").replace("sleep 3", "sleep 15")))
    cli.await_running(workflow)
    pid = cli.tasks(workflow)["worker"]["pid"]
    cli.kill_supervisor()
    wait_until(lambda: not Path(f"/proc/{pid}").exists(), 30)
    answer = cli.await_status(workflow, "FAILED")
    assert answer["groups"][0]["first_cause"]["exit_code"] == 5
    assert answer["groups"][0]["first_cause"]["task"] == "worker"


@pytest.mark.parametrize("victim", ["cancel", "keeper", "runner", "command"])
def test_detached_daemons_end_with_their_task(cli: Cli, victim: str) -> None:
    marker = f"hidden-{os.getpid()}-{victim}"
    cli.configure(stop_grace="1s", peer_failed_grace="1s")
    workflow = cli.submit(cli.spec(DAEMONS.replace("MARKER", marker)))
    cli.await_log(workflow, "daemons away")
    wait_until(lambda: len([pid for pid in _pids_with(marker) if not _is_child_of_test(pid)]) >= 5, 20)
    if victim == "cancel":
        assert cli.run("workflow", "cancel", workflow).code == 0
        cli.await_status(workflow, "FAILED_CANCELED")
    else:
        os.kill(_pids_of_task(cli, workflow, "master")[victim], signal.SIGKILL)
        cli.await_status(workflow, "FAILED", "FAILED_SERVER_ERROR")
    wait_until(lambda: not _pids_with(marker), 20)


def _is_child_of_test(pid: int) -> bool:
    return _parent(pid) == os.getpid()


def test_a_task_that_uses_too_much_memory_is_evicted_and_its_gang_stopped(cli: Cli) -> None:
    spec = """
workflow:
  name: greedy
  resources: {default: {memory: 64Mi}}
  groups:
  - name: g
    ignoreNonleadStatus: false
    tasks:
    - {name: modest, lead: true, command: [sleep, '600']}
    - {name: greedy, command: [python3, -c, 'import time; kept = bytearray(b"x" * (200 << 20)); time.sleep(600)']}
"""
    cli.configure(stop_grace="5s", peer_failed_grace="1s")
    done = cli.run("workflow", "submit", cli.spec(spec), "--wait")
    assert done.code == 1
    tasks = cli.tasks("greedy-1")
    assert (tasks["greedy"]["status"], tasks["greedy"]["exit_code"]) == ("FAILED_EVICTED", 3004)
    assert "the 64 MiB that it requested" in done.out + done.err
    cli.configure(enforce_limits="false")
    free = spec.replace("time.sleep(600)", "time.sleep(3)").replace("[sleep, '600']", "[sleep, '3']")
    assert cli.run("workflow", "submit", cli.spec(free), "--wait").code == 0
