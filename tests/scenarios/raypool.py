"""A pool on a real Ray cluster, which distflow uses on this machine or through one of the nodes over SSH."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

from distflow.testing.ray import RayCluster
from distflow.testing.sshd import Sshd

if TYPE_CHECKING:
    from scenarios.conftest import Cli

__all__ = ["RayPool"]


class RayPool:
    """The pool ``ray`` of a ``Cli``, and its Ray cluster."""

    def __init__(self, cli: Cli, cluster: RayCluster, login: Sshd | None = None) -> None:
        self.cli = cli
        self.cluster = cluster
        self.login = login
        if login is not None:
            (cli.folder / "ssh_config").write_text(login.client_stanza())
        self.configure()

    def configure(self, *, ray: dict[str, Any] | None = None, **settings: Any) -> None:
        """Write the configuration, with settings of the pool and of its ``ray``."""
        pool: dict[str, Any] = {
            "backend": "ray",
            "root": str(self.cli.top),
            "python": sys.executable,  # by default that of `ray`, which would become the Python of the tasks
            "ray": {"address": self.cluster.address, "python": self.cluster.python, "idle_release": "30s"} | (ray or {}),
        }
        if self.login is not None:
            pool |= {"login": self.login.alias, "ssh_config": str(self.cli.folder / "ssh_config")}
        text = json.dumps({"default_pool": "ray", "pools": {"ray": pool | settings}})
        (self.cli.folder / "distflow.yaml").write_text(text)

    def start(self, spec: str) -> tuple[str, str]:
        """Submit a gang, wait until it runs, and return the ids of its workflow and its placement group."""
        workflow = self.cli.submit(self.cli.spec(spec))
        self.cli.await_running(workflow)
        return workflow, self.group_of(workflow)

    def group_of(self, workflow: str) -> str:
        """The id of the placement group in which a workflow's first task runs."""
        node = next(iter(self.cli.tasks(workflow).values()))["node_name"]
        return str(node).partition("@")[2]
