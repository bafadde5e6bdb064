"""A pool on a real Slurm cluster, which distflow uses on this machine or through a login node over SSH."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

from distflow.testing.slurm import Slurm
from distflow.testing.sshd import Sshd
from distflow.testing.waiting import wait_until

if TYPE_CHECKING:
    from scenarios.conftest import Cli

__all__ = ["SHORT", "SPIN", "SPIN_ON_BOTH_NODES", "Cluster"]

SPIN = """
workflow:
  name: spin
  groups:
  - name: train
    tasks:
    - {name: master, lead: true, ranks: {size: 1}, command: [sh, -c, 'echo "$CUDA_VISIBLE_DEVICES on $MASTER_ADDR"; sleep 600']}
    - {name: worker, ranks: {size: 1}, command: [sh, -c, 'echo "rank $DISTFLOW_RANK_OFFSET"; sleep 600']}
  resources: {default: {gpu: 2, cpu: 1}}
"""
SPIN_ON_BOTH_NODES = SPIN.replace("gpu: 2, cpu: 1", "cpu: 16")
"""A gang that needs both nodes of the cluster, so that other gangs wait."""


SHORT = """
workflow:
  name: short
  groups:
  - name: g
    tasks: [{name: only, lead: true, ranks: {size: 1}, command: ["true"]}]
  resources: {default: {gpu: 1, cpu: 1}}
"""


class Cluster:
    """The pool ``cluster`` of a ``Cli``, and its Slurm cluster."""

    def __init__(self, cli: Cli, slurm: Slurm, login: Sshd | None = None) -> None:
        self.cli = cli
        self.slurm = slurm
        self.login = login
        if login is None:
            cli.environment["PATH"] = f"{slurm.commands}:{cli.environment['PATH']}"
        else:
            (cli.folder / "ssh_config").write_text(login.client_stanza())
        self.configure()

    def configure(self, *, slurm: dict[str, Any] | None = None, **settings: Any) -> None:
        """Write the configuration, with settings of the pool and of its ``slurm``."""
        folder = self.cli.folder
        pool: dict[str, Any] = {
            "backend": "slurm",
            "root": str(self.cli.top),
            "python": sys.executable,
            "slurm": {"partition": "main", "idle_release": "30s"} | (slurm or {}),
        }
        if self.login is not None:
            pool |= {"login": self.login.alias, "ssh_config": str(folder / "ssh_config")}
        text = json.dumps({"default_pool": "cluster", "pools": {"cluster": pool | settings}})
        (folder / "distflow.yaml").write_text(text)

    def start(self, spec: str = SPIN) -> tuple[str, str]:
        """Submit a gang, wait until it runs, and return the ids of its workflow and its job."""
        workflow = self.cli.submit(self.cli.spec(spec))
        self.cli.await_running(workflow)
        return workflow, self.job_of(workflow)

    def command(self, *words: str) -> str:
        """Run a command of Slurm and return its output."""
        done = subprocess.run(
            words, env=os.environ | self.slurm.environment, capture_output=True, text=True, timeout=60, check=True
        )
        return done.stdout

    def jobs(self) -> list[str]:
        """The ids of this distflow's jobs that have not ended."""
        lines = self.command("squeue", "-h", "-t", "all", "-o", "%i|%T|%k").splitlines()
        alive = ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING")
        return [words[0] for line in lines if (words := line.split("|"))[1] in alive and words[2].startswith("distflow:")]

    def await_no_jobs(self) -> None:
        """Wait until no job of this distflow is left in the queue."""
        wait_until(lambda: not self.jobs(), 60, "no job is left")

    def job_of(self, workflow: str) -> str:
        """The id of the job in which a workflow's first task runs."""
        node = next(iter(self.cli.tasks(workflow).values()))["node_name"]
        return str(node).partition("@")[2]
