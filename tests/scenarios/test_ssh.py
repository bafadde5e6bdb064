"""Gangs over SSH: three hosts, each with an OpenSSH server and a root of its own. Nothing is faked."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from distflow.testing.sshd import Sshd, missing_sshd
from scenarios.conftest import Cli
from scenarios.lab import GANG, Lab, copy_specs, run_pipeline, train

pytestmark = pytest.mark.ssh

SPECS = ("pytorch_dist_3", "pytorch_replicas", "pytorch_torchrun")
"""Specs that train. ``test_engines`` runs ``pytorch_dist`` on every backend."""


def test_each_task_of_a_gang_has_its_own_host_and_a_killed_supervisor_and_a_restarted_sshd_lose_nothing(lab: Lab) -> None:
    cli, go = lab.cli, lab.cli.folder / "go"
    workflow = cli.submit(cli.spec(GANG.replace("GO", str(go)).replace("; done'", "; done; exit 5'", 1)))
    tasks = cli.await_running(workflow)
    assert {name: task["node_name"] for name, task in tasks.items()} == {
        "master": "gpu1",
        "worker-0": "gpu2",
        "worker-1": "gpu3",
    }
    assert {name: task["ranks"] for name, task in tasks.items()} == {"master": "0-1", "worker-0": "2-3", "worker-1": "4-5"}
    assert "127.0.1.1 lo 0,1" in cli.await_log(workflow, "127.0.1.1")
    cli.kill_supervisor()
    lab.servers["gpu2"].restart()
    go.touch()
    answer = cli.await_status(workflow, "FAILED")
    assert answer["groups"][0]["first_cause"]["task"] == "master"
    assert answer["groups"][0]["first_cause"]["exit_code"] == 5
    assert "offset 4" in cli.logs(workflow, "--task", "worker-1")


@pytest.mark.torch
@pytest.mark.parametrize("name", SPECS)
def test_a_training_spec_completes_with_each_task_on_its_own_host(
    lab: Lab, repository: Path, name: str, forking_site: str
) -> None:
    lab.configure(environment={"PYTHONPATH": forking_site})
    tasks, finished = train(lab.cli, copy_specs(lab.cli, repository) / f"{name}.yaml", epochs=6)
    assert finished["accuracy"] > 0.95
    assert len({task["node_name"] for task in tasks.values()}) == len(tasks)


@pytest.mark.torch
def test_the_pipeline_copies_its_data_from_host_to_host(lab: Lab, repository: Path, forking_site: str) -> None:
    # No stage runs on the host of its inputs, so all inputs are copied.
    lab.configure(environment={"PYTHONPATH": forking_site})
    specs = copy_specs(lab.cli, repository)
    text = (specs / "pipeline.yaml").read_text()
    for task, host in (("prepare", "gpu1"), ("evaluate", "gpu3")):
        text = text.replace(f"    - name: {task}\n", f"    - name: {task}\n      resource: on-{host}\n")
    others = {f"on-{host}": {"nodesExcluded": [f"gpu{i}" for i in (1, 2, 3) if f"gpu{i}" != host]} for host in ("gpu1", "gpu3")}
    resources = {"default": {"nodesExcluded": ["gpu1"]}, **others}
    (specs / "pipeline.yaml").write_text(text.replace("  groups:\n", f"  resources: {json.dumps(resources)}\n  groups:\n", 1))
    assert run_pipeline(lab.cli, specs, epochs=6) > 0.95
    nodes = {name: task["node_name"] for name, task in lab.cli.tasks("pipeline-1").items()}
    assert nodes == {"prepare": "gpu1", "master": "gpu2", "worker": "gpu3", "evaluate": "gpu3"}


PAIR = """
workflow:
  name: pair
  groups:
  - name: train
    tasks:
    - name: master
      lead: true
      ranks: {size: 1}
      command: [sh, -c, 'seq -f "master %g" 300; echo "rank $RANK of $WORLD_SIZE"; sleep 600']
    - name: worker
      ranks: {size: 1}
      command: [sh, -c, 'seq -f "worker %g" 300; echo "rank $RANK of $WORLD_SIZE"; exec sleep 600']
"""


def _output_of_commands(cli: Cli, pool: str) -> dict[str, Any]:
    """Run and cancel a workflow. Return the output of each command, without times and with the same names for all pools."""
    workflow = cli.submit(cli.spec(PAIR), "--pool", pool)
    cli.await_running(workflow)
    for task in ("master", "worker"):
        cli.await_log(workflow, f"[{task}] rank")
    nodes = {task["node_name"] for task in cli.tasks(workflow).values()}

    def normalized(text: str) -> str:
        for name in nodes:
            text = re.sub(rf"\b{name}\b", "NODE", text)
        text = re.sub(r"\d{4}/\d\d/\d\d \d\d:\d\d:\d\d", "TIME", re.sub(r"\d:\d\d\b", "0:00", text))
        text = re.sub(r"pid \d+", "pid N", re.sub(r"port \d+", "port N", text.replace(workflow, "WORKFLOW")))
        return re.sub(r"\w+ \d+, \d{4} [\d:]+ \w+", "TIME", text.replace(f"pool {pool}", "POOL")).replace(pool, "POOL")

    def lines(text: str) -> list[str]:
        return sorted(" ".join(line.split()) for line in normalized(text).splitlines())

    shown: dict[str, Any] = {
        "logs": sorted(cli.logs(workflow).splitlines()),
        "running": lines(cli.run("workflow", "query", workflow).out),
    }
    shown["tail"] = cli.run("workflow", "logs", workflow, "--task", "worker", "--tail", "3").out.splitlines()
    canceled = cli.run("workflow", "cancel", workflow, "--wait", "60", "-m", "enough")
    shown["cancel"] = [canceled.code, normalized(canceled.out), canceled.err]
    shown["ended"] = lines(cli.run("workflow", "query", workflow).out)
    # The hosts that have answered at the first check of the gang vary.
    shown["events"] = [line for line in lines(cli.run("workflow", "events", workflow).out) if "connecting" not in line]
    shown["tasks"] = [
        {name: task[name] for name in ("name", "status", "exit_code", "signal", "ranks", "out_of_reach")}
        for task in cli.tasks(workflow).values()
    ]
    return shown


def test_logs_query_events_and_cancel_show_the_same_as_on_this_machine(lab: Lab) -> None:
    local, remote = _output_of_commands(lab.cli, "local"), _output_of_commands(lab.cli, "lab")
    assert len(local["logs"]) == 602
    assert {task["status"] for task in local["tasks"]} == {"FAILED_CANCELED"}
    for command, shown in local.items():
        assert remote[command] == shown, command


PRELUDE = """
workflow:
  name: prelude
  tasks:
  - {name: only, command: [sh, -c, 'echo "$LAB and $FROM_SETUP"']}
"""


def test_environment_and_setup_of_pool_and_node_reach_the_task(lab: Lab) -> None:
    cli = lab.cli
    lab.configure(
        names=("gpu1",),
        environment={"LAB": "from the pool", "FROM_SETUP": "not yet"},
        setup='export FROM_SETUP="$LAB, then the setup"',
        nodes={"gpu1": {"environment": {"LAB": "of the node"}}},
    )
    done = cli.run("workflow", "submit", cli.spec(PRELUDE), "--wait")
    assert done.code == 0, done.err
    assert "[only] of the node and of the node, then the setup\n" in done.out


def test_a_setup_that_fails_ends_the_task_with_its_error(lab: Lab) -> None:
    cli = lab.cli
    lab.configure(names=("gpu1",), setup="source /no/such/conda.sh || exit 41")
    done = cli.run("workflow", "submit", cli.spec(PRELUDE), "--wait")
    assert done.code == 1
    cause = cli.query("prelude-1")["groups"][0]["first_cause"]
    assert (cause["node"], cause["exit_code"]) == ("gpu1", 41)
    assert "/no/such/conda.sh: No such file or directory" in "".join(cause["lines"])
    assert "and" not in cli.logs("prelude-1")


INJECTED = """
workflow:
  name: injected
  tasks:
  - name: only
    command: [COMMAND]
    files:
    - {path: /tmp/entry.sh, contents: "#!/bin/sh\\necho it runs\\n"}
"""


def test_a_noexec_root_runs_everything_except_injected_programs(cli: Cli, tmp_path_factory: pytest.TempPathFactory) -> None:
    if why := missing_sshd():
        pytest.skip(why)
    root = cli.folder / "gpu1"
    root.mkdir()
    mount = f'mount -t tmpfs -o noexec none "{root}"'
    if subprocess.run(["unshare", "--mount", "sh", "-c", mount], capture_output=True, check=False).returncode != 0:
        pytest.skip("mounts need root")
    prefix = ["unshare", "--mount", "sh", "-c", f'{mount} && exec "$@"', "sh"]
    with Sshd(tmp_path_factory.mktemp("gpu1"), "127.0.1.1", alias="gpu1", prefix=prefix) as server:
        lab = Lab(cli, {"gpu1": server})
        good = cli.run("workflow", "submit", cli.spec(INJECTED.replace("COMMAND", "sh, /tmp/entry.sh")), "--wait")
        assert good.code == 0, good.err
        assert "[only] it runs\n" in good.out
        bad = cli.run("workflow", "submit", cli.spec(INJECTED.replace("COMMAND", "/tmp/entry.sh")), "--wait")
        assert bad.code == 1
        assert "is mounted with `noexec`; copy it elsewhere, or start a script with its interpreter" in bad.err, bad.err
        lab.await_no_processes()
