"""Gangs that are retried: real processes on this machine and on SSH hosts."""

from __future__ import annotations

import pytest

from distflow.testing.waiting import wait_until
from scenarios.conftest import Cli
from scenarios.lab import Lab

FLAKY = """
workflow:
  name: flaky
  retry: {limit: 3, backoff: BACKOFF}
  groups:
  - name: train
    tasks:
    - name: master
      lead: true
      ranks: {size: 2}
      command:
      - sh
      - -c
      - |
        echo "attempt $DISTFLOW_RETRY_ID"
        echo "$DISTFLOW_RETRY_ID" > "$DISTFLOW_OUTPUT/attempt"
        touch "UP-$DISTFLOW_RETRY_ID"
        [ "$DISTFLOW_RETRY_ID" -ge 2 ] || exec sleep 600
    - name: worker
      ranks: {size: 2}
      command:
      - sh
      - -c
      - |
        echo "attempt $DISTFLOW_RETRY_ID"
        while [ ! -e "UP-$DISTFLOW_RETRY_ID" ]; do sleep 0.2; done
        [ "$DISTFLOW_RETRY_ID" -ge 2 ] || exit 75
      exitActions: {RESCHEDULE: "75"}
"""
"""The worker fails once the master runs. If it failed earlier, the master would never run, and would have no exit code."""


def flaky(cli: Cli, backoff: str) -> str:
    return cli.spec(FLAKY.replace("BACKOFF", backoff).replace("UP", str(cli.folder / "up")))


CLOCK_SET_BACK = """
import os, time
real = time.time
time.time = lambda: real() - (3600.0 if os.path.exists({set_back!r}) else 0.0)
"""


def test_a_clock_that_is_set_back_does_not_lengthen_the_backoff(cli: Cli) -> None:
    set_back = cli.folder / "jumped"
    (cli.folder / "sitecustomize.py").write_text(CLOCK_SET_BACK.format(set_back=str(set_back)))
    cli.environment["PYTHONPATH"] = str(cli.folder)
    workflow = cli.submit(flaky(cli, "4s"))
    cli.await_event(workflow, "RESCHEDULED")
    set_back.touch()
    cli.await_status(workflow, "COMPLETED")


@pytest.mark.parametrize("backend", ["local", "ssh"])
def test_a_gang_is_retried_until_it_completes(backend: str, cli: Cli, request: pytest.FixtureRequest) -> None:
    if backend == "ssh":
        request.getfixturevalue("lab")
    done = cli.run("workflow", "submit", flaky(cli, "100ms"), "--wait", timeout=180)
    assert done.code == 0, done.err
    ident = "flaky-1"
    for task in ("master", "worker"):
        logs = cli.run("workflow", "logs", ident, "--task", task).out.splitlines()
        expected = [f"[{task}] attempt 0", f"[{task} retry-1] attempt 1", f"[{task} retry-2] attempt 2"]
        assert logs == expected
    assert cli.run("workflow", "logs", ident, "-t", "worker", "-r", "1").out == "[worker retry-1] attempt 1\n"
    for option, folder, content in (([], ident, "2\n"), (["--retry-id", "0"], f"{ident}-retry-0", "0\n")):
        assert cli.run("fetch", ident, *option).out == f"fetched 1 file, 2 B, to {folder}\n"
        assert (cli.folder / folder / "attempt").read_text() == content
    done = cli.run("workflow", "outputs", ident, "-r", "3")
    assert (done.code, done.err) == (2, f"error: master of {ident} has no attempt 3\nits attempts: 0-2\n")
    for options in ([], ["--error"]):
        done = cli.run("workflow", "logs", ident, "--task", "worker", "-r", "3", *options)
        hint = "attempts are counted from 0; the last one is 2"
        assert (done.code, done.err) == (2, f"error: {ident} has no attempt 3\n{hint}\n")
    second = cli.run("workflow", "events", ident, "--task", "worker", "--retry-id", "1").out.splitlines()
    assert second
    assert all("[worker retry-1]" in line for line in second), second
    events = cli.run("workflow", "events", ident).out
    assert "train: RESCHEDULED: worker: exit code 75; attempt 2 of at most 4 begins in 0.1 s" in events
    assert "[worker retry-2] COMPLETED" in events
    shown = cli.run("workflow", "query", ident, "-v").out
    assert "Attempt 2: worker on " in shown
    group = cli.query(ident, "-v")["groups"][0]
    assert [(task["name"], task["retry_id"], task["status"], task["exit_code"]) for task in group["tasks"]] == [
        ("master", 2, "COMPLETED", 0), ("master", 1, "RESCHEDULED", 143), ("master", 0, "RESCHEDULED", 143),
        ("worker", 2, "COMPLETED", 0), ("worker", 1, "RESCHEDULED", 75), ("worker", 0, "RESCHEDULED", 75),
    ]  # fmt: skip
    assert [cause["task"] for cause in group["earlier_causes"]] == ["worker", "worker"]
    assert [task["retry_id"] for task in cli.query(ident)["groups"][0]["tasks"]] == [2, 2]
    wait_until(lambda: not cli.processes(), 60)


def test_the_next_attempt_starts_once_if_the_supervisor_is_killed_during_the_backoff(cli: Cli) -> None:
    ident = cli.submit(flaky(cli, "2s"))
    wait_until(lambda: cli.tasks(ident)["worker"]["retry_id"] == 1, 60)
    cli.kill_supervisor()
    cli.await_status(ident, "COMPLETED")
    logs = cli.run("workflow", "logs", ident, "--task", "worker").out
    assert logs == "[worker] attempt 0\n[worker retry-1] attempt 1\n[worker retry-2] attempt 2\n"


def test_exit_actions_apply_to_exit_codes_and_signals(cli: Cli) -> None:
    spec = """
workflow:
  name: codes
  retry: {backoff: 0}
  tasks:
  - name: killed
    command: [sh, -c, '[ $DISTFLOW_RETRY_ID = 1 ] || kill -9 $$']
    exitActions: {RESCHEDULE: "137"}
  - name: three
    command: [sh, -c, 'exit 3']
    exitActions: {COMPLETE: "1-3"}
  - name: zero
    command: ["true"]
    exitActions: {FAIL: "0"}
"""
    done = cli.run("workflow", "submit", cli.spec(spec), "--wait")
    assert done.code == 1
    tasks = cli.tasks("codes-1")
    assert (tasks["killed"]["status"], tasks["killed"]["retry_id"]) == ("COMPLETED", 1)
    assert (tasks["three"]["status"], tasks["three"]["exit_code"]) == ("COMPLETED", 3)
    assert (tasks["zero"]["status"], tasks["zero"]["exit_code"]) == ("FAILED", 0)
    assert "exit code 0: counts as failure (exitActions)" in cli.run("workflow", "query", "codes-1").out


@pytest.mark.usefixtures("lab")
def test_the_next_attempt_gets_its_inputs_again(cli: Cli) -> None:
    spec = """
workflow:
  name: again
  retry: {backoff: 0}
  tasks:
  - {name: make, command: [sh, -c, 'echo data > "{{output}}/data"']}
  - name: use
    command: [sh, -c, 'cat "{{input:0}}/data"; rm "{{input:0}}/data"; [ $DISTFLOW_RETRY_ID -gt 0 ]']
    inputs: [{task: make}]
    exitActions: {RESCHEDULE: "1"}
"""
    ident = cli.submit(cli.spec(spec))
    cli.await_status(ident, "COMPLETED")
    assert cli.run("workflow", "logs", ident, "--task", "use", "-r", "1").out == "[use retry-1] data\n"


def test_a_node_that_is_lost_is_replaced(lab: Lab, cli: Cli) -> None:
    lab.configure(node_lost_after="2s", connect_timeout="2s")
    spec = """
workflow:
  name: moved
  retry: {backoff: 0}
  tasks:
  - name: one
    command: [sh, -c, '[ $DISTFLOW_RETRY_ID -ge 1 ] || exec sleep 600']
    exitActions: {RESCHEDULE: "3001"}
"""
    ident = cli.submit(cli.spec(spec))
    wait_until(lambda: cli.tasks(ident)["one"]["status"] == "RUNNING", 60)
    first = cli.tasks(ident)["one"]["node_name"]
    lab.servers[first].stop()
    cli.await_status(ident, "COMPLETED")
    assert cli.tasks(ident)["one"]["node_name"] != first
    lab.servers[first].start()
    lab.await_abandoned_attempt_end(ident, "one")
    lab.await_no_processes()


ELASTIC = """
workflow:
  name: elastic
  groups:
  - name: train
    elastic: {min: 2, wait: 1s}
    retry: {backoff: 100ms}
    tasks:
    - name: master
      lead: true
      ranks: {size: 2}
      command: &command
      - sh
      - -c
      - |
        echo "node $NODE_RANK of $NNODES, $DISTFLOW_WORLD_SIZE ranks, {{world_size}} in all"
        while [ ! -e GO ]; do sleep 0.2; done
      exitActions: &actions {RESCHEDULE: "3001"}
    - name: worker
      replicas: 2
      ranks: {size: 2}
      command: *command
      exitActions: *actions
"""


@pytest.mark.ssh
def test_an_elastic_gang_continues_without_a_lost_host(lab: Lab) -> None:
    lab.configure(connect_timeout="2s", node_lost_after="4s")
    cli, go = lab.cli, lab.cli.folder / "go"
    ident = cli.submit(cli.spec(ELASTIC.replace("GO", str(go))))
    tasks = cli.await_running(ident)
    assert len(tasks) == 3
    lost = tasks["worker-1"]["node_name"]
    lab.servers[lost].freeze()
    wait_until(lambda: cli.query(ident)["groups"][0]["left_out"] == ["worker-1"], 60)
    tasks = cli.await_running(ident)
    assert lost not in [task["node_name"] for task in tasks.values()]
    assert "runs without worker-1, because the pool has too little room (elastic)" in cli.run("workflow", "query", ident).out
    for number, task in enumerate(("master", "worker-0")):
        wait_until(lambda task=task: "in all" in cli.logs(ident, "--task", task, "--retry-id", "1"), 60)  # type: ignore[misc]
        expected = f"node {number} of 2, 4 ranks, 4 in all"
        assert cli.logs(ident, "--task", task, "--retry-id", "1").strip().endswith(expected)
    assert "of 3, 6 ranks, 6 in all" in cli.logs(ident, "--task", "master", "--retry-id", "0")
    lab.servers[lost].thaw()
    lab.await_abandoned_attempt_end(ident, "worker-1")
    go.touch()
    cli.await_status(ident, "COMPLETED")
