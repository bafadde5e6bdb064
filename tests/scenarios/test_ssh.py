"""The same gangs over SSH: three hosts, each with an OpenSSH server and a root of its own; nothing is faked."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from distflow.testing.sshd import Sshd, make_key, missing_sshd
from distflow.testing.waiting import wait_until
from scenarios.conftest import Cli

pytestmark = pytest.mark.ssh

GANG = """
workflow:
  name: gang
  resources: {default: {gpu: 2}}
  groups:
  - name: train
    tasks:
    - name: master
      lead: true
      ranks: {size: 2}
      command: [sh, -c, 'echo "$MASTER_ADDR $GLOO_SOCKET_IFNAME $CUDA_VISIBLE_DEVICES"; while [ ! -e GO ]; do sleep 0.1; done']
    - name: worker
      replicas: 2
      ranks: {size: 2}
      command: [sh, -c, 'echo "offset $DISTFLOW_RANK_OFFSET"; while [ ! -e GO ]; do sleep 0.1; done']
"""


class Lab:
    """Three hosts behind SSH, and the configuration of a pool of them."""

    def __init__(self, cli: Cli, servers: dict[str, Sshd]) -> None:
        self.cli = cli
        self.servers = servers
        config = cli.folder / "ssh_config"
        config.write_text("".join(server.client_stanza() for server in servers.values()))
        nodes = [
            f"    - {{name: {name}, root: {cli.folder / name}, lease_dir: {cli.folder / name}-leases, gpus: 2}}"
            for name in servers
        ]
        lines = ["default_pool: lab", "pools:", "  lab:", "    backend: ssh", f"    ssh_config: {config}"]
        lines += [f"    python: {sys.executable}", "    peer_failed_grace: 1s", "    ping: 1s", "    nodes:", *nodes]
        (cli.folder / "distflow.yaml").write_text("\n".join(lines) + "\n")


@pytest.fixture
def lab(cli: Cli, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """A pool ``lab`` of three hosts: gpu1, gpu2 and gpu3."""
    if why := missing_sshd():
        pytest.skip(why)
    key = make_key(tmp_path_factory.mktemp("key") / "id")
    with ExitStack() as stack:
        servers = {
            f"gpu{i}": stack.enter_context(
                Sshd(tmp_path_factory.mktemp(f"gpu{i}"), f"127.0.1.{i}", alias=f"gpu{i}", user_key=key)
            )
            for i in (1, 2, 3)
        }
        yield Lab(cli, servers)
        # The agents end with their connections; the supervisor with its work.
        wait_until(lambda: not cli.processes(), 30)


def test_each_task_of_a_world_has_a_host_of_its_own(lab: Lab) -> None:
    cli, go = lab.cli, lab.cli.folder / "go"
    workflow = cli.submit(cli.spec(GANG.replace("GO", str(go))))
    tasks = cli.await_running(workflow)
    assert {name: task["node_name"] for name, task in tasks.items()} == {
        "master": "gpu1",
        "worker-0": "gpu2",
        "worker-1": "gpu3",
    }
    assert {name: task["ranks"] for name, task in tasks.items()} == {"master": "0-1", "worker-0": "2-3", "worker-1": "4-5"}
    assert "127.0.1.1 lo 0,1" in cli.await_log(workflow, "127.0.1.1")
    go.touch()
    cli.await_status(workflow, "COMPLETED")
    assert "offset 4" in cli.logs(workflow, "--task", "worker-1")


@pytest.mark.torch
@pytest.mark.parametrize("name", ["pytorch_dist", "pytorch_torchrun"])
def test_training_runs_across_hosts(lab: Lab, repository: Path, name: str) -> None:
    cli = lab.cli
    for folder in ("workflow_specs", "scripts"):
        shutil.copytree(repository / folder, cli.folder / folder)
    done = cli.run("workflow", "submit", f"workflow_specs/{name}.yaml", "--wait", "--set", "epochs=8", timeout=170)
    assert done.code == 0, done.err + done.out
    ident = json.loads(cli.run("workflow", "list", "-t", "json").out)["workflows"][0]["name"]
    # Which two of the three is decided by who answers first.
    assert len({task["node_name"] for task in cli.tasks(ident).values()}) == 2
    assert '"event": "finished"' in cli.logs(ident)


def test_a_killed_supervisor_and_a_restarted_sshd_lose_nothing(lab: Lab) -> None:
    cli, go = lab.cli, lab.cli.folder / "go"
    workflow = cli.submit(cli.spec(GANG.replace("GO", str(go)).replace("; done'", "; done; exit 5'", 1)))
    cli.await_running(workflow)
    supervisor = cli.supervisor()
    assert supervisor is not None
    os.kill(supervisor, signal.SIGKILL)
    lab.servers["gpu2"].restart()
    go.touch()
    answer = cli.await_status(workflow, "FAILED")
    assert answer["groups"][0]["first_cause"]["task"] == "master"
    assert answer["groups"][0]["first_cause"]["exit_code"] == 5


def test_cancel_leaves_nothing_on_any_host(lab: Lab) -> None:
    cli = lab.cli
    workflow = cli.submit(cli.spec(GANG.replace("GO", str(cli.folder / "never"))))
    cli.await_running(workflow)
    assert cli.run("workflow", "cancel", workflow, "--wait", "60").code == 0
    assert cli.query(workflow)["status"] == "FAILED_CANCELED"


def test_a_refused_host_key_is_said_and_the_gang_waits(lab: Lab) -> None:
    cli, go = lab.cli, lab.cli.folder / "go"
    lab.servers["gpu3"].known_hosts.write_text("")
    workflow = cli.submit(cli.spec(GANG.replace("GO", str(go))))
    wait_until(lambda: "gpu3" in str(cli.query(workflow)["groups"][0]), 60)
    assert "host key" in str(cli.query(workflow)["groups"][0]).lower()
    lab.servers["gpu3"].known_hosts.write_text("".join(lab.servers["gpu3"].known_lines()))
    go.touch()
    cli.await_status(workflow, "COMPLETED", timeout=120)
