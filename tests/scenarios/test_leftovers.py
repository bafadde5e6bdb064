"""``node reap`` stops processes that crashes left on nodes, and ``node uninstall`` removes distflow's files."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

from contract.test_runtime_faults import is_dead
from distflow.testing.waiting import wait_until

if TYPE_CHECKING:
    from scenarios.conftest import Cli
    from scenarios.lab import Lab

DAEMON = """
workflow:
  name: daemon
  tasks:
  - name: one
    command: [sh, -c, 'setsid sleep 600 & echo up; wait']
"""
KEPT = """
workflow:
  name: kept
  tasks:
  - name: one
    command: [sh, -c, 'while [ ! -e GO ]; do sleep 0.2; done']
"""


def crash(cli: Cli, root: Path) -> str:
    """Kill supervisor, agents, runner and keeper of a workflow at the same moment. Return the attempt of its task."""
    (path,) = root.glob("*/*/one/0/runner.json")
    state = json.loads(path.read_text())
    supervisor = cli.supervisor()
    assert supervisor is not None
    agents = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit() and is_agent(entry, cli)]
    victims = [supervisor, *agents, state["runner"]["pid"], state["keeper"]["pid"]]
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for pid in victims:
            with contextlib.suppress(ProcessLookupError):  # the keeper ends with its runner
                os.kill(pid, number)
    wait_until(lambda: all(is_dead(pid) for pid in victims), 20)
    return str(path.parent.relative_to(root))


def is_agent(entry: Path, cli: Cli) -> bool:
    try:
        return (entry / "comm").read_text() == "df-agent\n" and os.fsencode(cli.folder) in (entry / "cmdline").read_bytes()
    except OSError:
        return False


def reap_json(cli: Cli, *arguments: str) -> dict[str, Any]:
    """Run ``node reap``, and return its JSON output."""
    done = cli.run("node", "reap", "-t", "json", *arguments)
    assert done.code == 0, done.err
    answer: dict[str, Any] = json.loads(done.out)
    return answer


def ours(node: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the found processes to stop. The list also has processes of concurrent tests."""
    return [one for one in node["found"] if one["is_ours"]]


def test_reap_stops_the_processes_that_a_crash_of_distflow_left(cli: Cli) -> None:
    cli.configure(stop_grace="1s")
    go = cli.folder / "go"
    workflow = cli.submit(cli.spec(DAEMON))
    cli.await_log(workflow, "up")
    attempt = crash(cli, cli.root)
    (sleep,) = [pid for pid, command in cli.processes() if command == "sleep 600 "]

    node = reap_json(cli, "--dry-run")["nodes"][0]
    assert [(one["pid"], one["name"], one["attempt"]) for one in ours(node)] == [(sleep, "sleep", attempt)], node
    assert (node["node"], node["settled"], node["error"]) == ("local", [attempt], None)
    text = cli.run("node", "reap", "--dry-run")
    assert text.code == 0
    assert "would stop" in text.out
    assert f"local: the end of 1 attempt would be recorded: {workflow}/" in text.out
    assert attempt.split("/")[0] not in text.out + text.err
    assert "Dry run: nothing was stopped." in text.err
    assert sleep in [pid for pid, _ in cli.processes()]

    done = cli.run("node", "reap", "--node", "local")
    assert (done.code, done.err) == (0, "")
    assert "stopped" in done.out
    assert sleep not in [pid for pid, _ in cli.processes()]
    assert ours(reap_json(cli)["nodes"][0]) == []
    # The next supervisor reads the recorded end. Reap does not stop running tasks.
    cli.await_status(workflow, "FAILED_SERVER_ERROR")
    kept = cli.submit(cli.spec(KEPT.replace("GO", str(go))))
    cli.await_running(kept)
    assert ours(reap_json(cli)["nodes"][0]) == []
    go.touch()
    cli.await_status(kept, "COMPLETED")

    wrong = cli.run("node", "reap", "--node", "nowhere")
    assert (wrong.code, "nodes: `local`" in wrong.err) == (2, True)


def test_reap_names_an_unreachable_node_and_continues_with_the_others(lab: Lab) -> None:
    lab.configure(nodes={"gpu2": {"host": "127.0.1.99", "port": 9}}, connect_timeout="5s")
    done = lab.cli.run("node", "reap", "--pool", "lab")
    assert done.code == 3
    assert done.err.startswith("error: gpu2: "), done.err
    done = lab.cli.run("node", "reap", "--pool", "lab", "-t", "json")
    assert done.code == 3
    assert [bool(one["error"]) for one in json.loads(done.out)["nodes"]] == [False, True, False]


def test_uninstall_refuses_while_a_task_runs_and_keeps_only_files_of_users(cli: Cli) -> None:
    cli.configure(gpus=1)
    go = cli.folder / "go"
    gpu = KEPT.replace("name: kept\n", "name: kept\n  resources: {default: {gpu: 1}}\n")
    workflow = cli.submit(cli.spec(gpu.replace("GO", str(go))))
    cli.await_running(workflow)
    unconfirmed = cli.run("node", "uninstall")
    assert (unconfirmed.code, "--yes" in unconfirmed.err) == (2, True)
    refused = cli.run("node", "uninstall", "--yes")
    assert (refused.code, f"shares its root directory: {workflow}/one" in refused.err) == (3, True), refused.err
    assert cli.tasks(workflow)["one"]["status"] == "RUNNING"
    assert (cli.leases / "gpu-0.lock").exists()
    go.touch()
    cli.await_status(workflow, "COMPLETED")
    wait_until(lambda: cli.supervisor() is None, 30)

    user_files = [cli.top / "datasets" / "mnist" / "images.bin", cli.top / "blobs" / "model.pt", cli.root / "mine.txt"]
    user_files.append(cli.root / "blobs" / "notes")
    for path in user_files:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("not yours")
    wait_until(lambda: cli.run("node", "uninstall", "--yes", "-t", "json").code == 0, 30)
    files = [path for path in cli.top.rglob("*") if path.is_file()]
    assert sorted(files) == sorted([*user_files, cli.root / ".distflow"])
    assert not cli.leases.exists()
    text = cli.run("node", "uninstall", "--yes")
    assert text.out == (
        f"local: removed, except:\n  {cli.root}/blobs: it contains files that do not belong to distflow\n"
        f"  {cli.root}/mine.txt: it does not belong to distflow\n"
    )
    for path in user_files[2:]:
        path.unlink()
    assert cli.run("node", "uninstall", "--yes").out == "local: removed\n"
    assert sorted(path for path in cli.top.rglob("*") if path.is_file()) == sorted(user_files[:2])


def test_uninstall_keeps_and_names_a_locked_lease(cli: Cli) -> None:
    cli.leases.mkdir()
    (cli.leases / "gpu-0.lock").touch()
    (cli.leases / "gpu-1.lock").touch()
    (cli.leases / "somebody.txt").touch()
    with (cli.leases / "gpu-1.lock").open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        done = json.loads(cli.run("node", "uninstall", "--yes", "-t", "json").out)["nodes"][0]
    assert sorted(path.name for path in cli.leases.iterdir()) == ["gpu-1.lock", "somebody.txt"]
    assert [one.split(":")[0] for one in done["left"]] == [f"{cli.leases}/gpu-1.lock", str(cli.leases)]
