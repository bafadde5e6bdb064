"""A pool of hosts behind real OpenSSH servers, and helpers for the specs of ``workflow_specs/``."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distflow.testing.sshd import Sshd
from distflow.testing.waiting import wait_until

if TYPE_CHECKING:
    from scenarios.conftest import Cli

__all__ = ["GANG", "TORCHRUN", "Lab", "copy_specs", "json_lines", "largest_file_size", "run_pipeline", "train"]

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
      command: [sh, -c, 'echo "$MASTER_ADDR $GLOO_SOCKET_IFNAME $CUDA_VISIBLE_DEVICES"; while [ ! -e GO ]; do sleep 0.2; done']
    - name: worker
      replicas: 2
      ranks: {size: 2}
      command: [sh, -c, 'echo "offset $DISTFLOW_RANK_OFFSET"; while [ ! -e GO ]; do sleep 0.2; done']
"""
"""Three tasks on three nodes, which run until the file GO exists."""

TORCHRUN = """
workflow:
  name: trains
  groups:
  - name: train
    launcher: torchrun
    tasks:
    - name: one
      lead: true
      ranks: {size: 2}
      command: [python3, train.py]
      files: [{path: train.py, contents: "print('never')"}]
"""
"""A task that torchrun starts."""


class Lab:
    """Hosts behind SSH, and the configuration of a pool ``lab`` of them."""

    def __init__(self, cli: Cli, servers: Mapping[str, Sshd]) -> None:
        self.cli = cli
        self.servers = dict(servers)
        self.ssh_config = cli.folder / "ssh_config"
        self.ssh_config.write_text("".join(server.client_stanza() for server in servers.values()))
        for name in servers:
            cli.add_node(cli.folder / name)
        self.configure()

    def configure(
        self, *, names: tuple[str, ...] = (), nodes: Mapping[str, Mapping[str, Any]] | None = None, **settings: Any
    ) -> None:
        """Write the configuration: the hosts ``names`` (default: all), with settings of the pool and of some ``nodes``."""
        folder = self.cli.folder

        def node(name: str) -> dict[str, Any]:
            given = {
                "name": name,
                "root": str(folder / name),
                "lease_dir": f"{folder / name}-leases",
                "gpus": 2,
                "check_capacity": False,
            }
            return given | dict((nodes or {}).get(name, {}))

        pool = {
            "backend": "ssh", "ssh_config": str(self.ssh_config), "python": self.cli.python, "peer_failed_grace": "1s",
            "stop_grace": "5s", "ping": "1s", "nodes": [node(name) for name in names or self.servers], **settings,
        }  # fmt: skip
        local = {"backend": "local", "peer_failed_grace": "1s", "stop_grace": "5s", "nodes": [
            {"name": "here", "root": str(self.cli.top), "lease_dir": str(self.cli.leases), "gpus": 6,
             "check_capacity": False}
        ]}  # fmt: skip
        # JSON is YAML.
        text = json.dumps({"default_pool": "lab", "pools": {"lab": pool, "local": local}}, indent=1)
        (folder / "distflow.yaml").write_text(text)

    def submit(self, go: Path, spec: str = GANG) -> str:
        """Submit a gang that runs until ``go`` exists."""
        return self.cli.submit(self.cli.spec(spec.replace("GO", str(go))))

    def await_message(self, workflow: str, *texts: str, timeout: float = 60.0) -> str:
        """Wait until the output of ``query`` contains all ``texts``, and return it."""
        return self.cli.await_output(
            lambda shown: all(text in shown for text in texts), "workflow", "query", workflow, timeout=timeout
        )

    def await_abandoned_attempt_end(self, workflow: str, task: str, timeout: float = 90.0) -> None:
        """Wait until a task's abandoned attempt on a lost node has been stopped."""
        self.cli.await_event(workflow, f"[{task}] the abandoned attempt on", timeout)

    def await_no_processes(self, timeout: float = 60.0) -> None:
        """Wait until no process of this distflow is left on any host."""
        wait_until(lambda: not self.cli.processes(), timeout, "no process is left")


def copy_specs(cli: Cli, repository: Path) -> Path:
    """Copy ``workflow_specs/`` to the folder of ``cli``, and return the copy."""
    shutil.copytree(repository / "workflow_specs", cli.folder / "workflow_specs")
    return cli.folder / "workflow_specs"


def largest_file_size(folder: Path) -> int:
    """Return the size of the largest file below a folder, which shows how much of a large file has arrived."""
    largest = 0
    for directory, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                largest = max(largest, os.stat(os.path.join(directory, name)).st_size)
    return largest


def json_lines(log: str) -> list[dict[str, Any]]:
    """Return the JSON documents in the output of tasks, one for each line."""
    texts = (line.partition("] ")[2] for line in log.splitlines())
    return [json.loads(text) for text in texts if text.startswith("{")]


def train(cli: Cli, spec: Path, *, epochs: int) -> tuple[dict[str, dict[str, Any]], dict[str, Any]]:
    """Run a training spec until it ends, and check that each rank started once. Return its tasks and its ``finished`` event."""
    done = cli.run("workflow", "submit", str(spec), "--wait", "--set", f"epochs={epochs}", timeout=170)
    assert done.code == 0, done.err + done.out
    workflow = done.out.splitlines()[0]
    rows, tasks = json_lines(cli.logs(workflow)), cli.tasks(workflow)
    claimed = {rank for task in tasks.values() for rank in range(*_range(task["ranks"]))}
    started = [row for row in rows if row.get("event") == "started"]
    assert sorted(row["rank"] for row in started) == sorted(claimed) == list(range(len(claimed)))
    assert {row["world_size"] for row in started} == {len(claimed)}
    return tasks, next(row for row in rows if row.get("event") == "finished")


def run_pipeline(cli: Cli, specs: Path, *, epochs: int) -> float:
    """Run ``pipeline.yaml`` until it ends, and check that evaluation and training agree. Return the accuracy."""
    done = cli.run("workflow", "submit", str(specs / "pipeline.yaml"), "--wait", "--set", f"epochs={epochs}", timeout=170)
    assert done.code == 0, done.err + done.out
    rows = json_lines(cli.logs("pipeline-1"))
    accuracies = {row["event"]: row["accuracy"] for row in rows if row.get("event") in ("finished", "evaluated")}
    assert abs(accuracies["evaluated"] - accuracies["finished"]) < 0.01
    directory = Path(cli.tasks("pipeline-1")["evaluate"]["output_dir"]).parent / "input"
    assert sorted(path.name for path in directory.glob("*/*")) == [
        "model.pt",
        "t10k-images-idx3-ubyte",
        "t10k-labels-idx1-ubyte",
    ]
    return float(accuracies["evaluated"])


def _range(text: str) -> tuple[int, int]:
    first, _, last = text.partition("-")
    return int(first), int(last or first) + 1
