"""A real Ray cluster for tests: a head and more nodes, all on this machine, with GPUs that do not exist.

It starts in about 10 s. ``stop`` ends all of its processes and removes its files.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from types import TracebackType
from typing import IO, Any, cast

from distflow.backends.allocated.ray.program import ClusterProgram
from distflow.errors import DistflowError, NodeUnreachable
from distflow.testing.daemons import free_port, start_daemon
from distflow.testing.waiting import is_alive, wait_until
from distflow.transports.local import LocalTransport

__all__ = ["RayCluster", "missing_ray"]

_MARK = "TEST_RAY_CLUSTER"
_MAX_STARTS = 3
"""The maximum number of starts of a node that ends before it joins the head."""
_SETTINGS = {
    # Ray detects the loss of a node after 3 s, not after 15 s.
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "3000",
    "RAY_health_check_failure_threshold": "3",
    "RAY_gcs_rpc_server_reconnect_timeout_s": "10",
    "RAY_memory_monitor_refresh_ms": "0",
    "RAY_enable_metrics_collection": "0",
    "RAY_prestart_worker_first_driver": "0",  # do not start two idle workers, which no test uses
}
_CLI = "from ray.scripts.scripts import main; main()"
_RUNNER = """\
import functools, io, json, os, ray, sys
answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # Ray prints messages of its daemons to standard output at any time
ray.init(address=sys.argv[1], namespace="distflow", log_to_driver=False, logging_level="ERROR")
ray._private.worker.global_worker.threads_stopped.set()  # as in cluster_program.py
for line in sys.stdin:
    output = io.StringIO()
    exec(json.loads(line), {"ray": ray, "print": functools.partial(print, file=output)})
    print(json.dumps(output.getvalue()), file=answers, flush=True)
"""


def missing_ray() -> str:
    """Return the reason why no cluster can be started here; empty if one can."""
    return "" if Path(sys.executable).with_name("ray").exists() else "ray not found: pip install ray"


class RayCluster:
    """A context manager for one cluster. Its nodes are ``n1``, which is the head, ``n2`` and so on."""

    def __init__(self, *, nodes: int = 2, cpus: int = 8, gpus: int = 2, python: str = sys.executable) -> None:
        """Choose ports and a directory. Each node reports ``cpus`` CPUs and ``gpus`` GPUs, independently of this machine.

        ``python`` runs ``ray start`` and the programs that connect to the cluster.
        """
        self.python = python
        self.nodes = tuple(f"n{number}" for number in range(1, nodes + 1))
        # A short path, because the paths of the Unix sockets in it must be shorter than 108 bytes.
        self.folder = Path(tempfile.mkdtemp(prefix="ray-"))
        self._name = secrets.token_hex(8)
        port = self._port = free_port("", 3)
        self._client_port, self._dashboard_port = port + 1, port + 2
        self.address = f"{_own_address()}:{self._port}"
        # Without its log monitor and the autoscaler's monitor (`--no-monitor` of the head), Ray starts a sixth faster.
        self._options = [
            f"--num-cpus={cpus}", f"--num-gpus={gpus}", "--object-store-memory=80000000", "--include-log-monitor=false",
        ]  # fmt: skip
        self._environment = os.environ | _SETTINGS
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}
        self._program = ClusterProgram(LocalTransport("ray"), python=self.python, address=self.address)
        self._runner: subprocess.Popen[str] | None = None

    def __enter__(self) -> RayCluster:
        """Start."""
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Stop."""
        self.stop()

    def start(self) -> None:
        """Start all nodes, and wait until they have joined the head."""
        for node in self.nodes:
            self.start_node(node)

    def stop(self) -> None:
        """Kill all of its processes, including its actors. May be called twice."""
        self._close_programs()
        for node in reversed(self.nodes):
            self.kill_node(node)
        shutil.rmtree(self.folder, ignore_errors=True)

    def start_node(self, node: str) -> None:
        """Start a node that is not running, and wait until it has joined the head.

        On a busy machine, a start may exceed Ray's timeout of 30 s, which no setting changes. The node is then started again.
        Raises ``RuntimeError`` if, in each of three starts, Ray exits before the node has joined, and ``TimeoutError`` if a
        running node does not join within 90 s.
        """
        for attempt in range(_MAX_STARTS):
            self._launch(node)
            try:
                wait_until(lambda: self._is_up(node), 90, f"node {node} is up; its log: {self.folder}/{node}.log")
                return
            except RuntimeError:
                if attempt == _MAX_STARTS - 1:
                    raise
                self.kill_node(node)

    def _launch(self, node: str) -> None:
        is_head = node == self.nodes[0]
        role_options = (
            [
                "--head", f"--port={self._port}", f"--temp-dir={self.folder}", "--include-dashboard=false",
                f"--ray-client-server-port={self._client_port}", f"--dashboard-port={self._dashboard_port}", "--no-monitor",
            ]
            if is_head
            else [f"--address={self.address}", f"--node-ip-address=127.0.0.{self.nodes.index(node) + 1}"]
        )  # fmt: skip
        start = ["start", "--block", "--disable-usage-stats", f"--node-name={node}", *role_options, *self._options]
        self._daemons[node] = start_daemon(
            [self.python, "-c", _CLI, *start],
            self.folder / f"{node}.log",
            cwd=self.folder,
            env=self._environment | {_MARK: f"{self._name}/{node}"},
        )
        if is_head:
            self._close_programs()

    def kill_node(self, node: str) -> None:
        """Kill Ray's processes and actors on a node, as a power failure does."""
        daemon = self._daemons.pop(node, None)
        if daemon is not None:
            daemon.kill()
            daemon.wait(60)
        wait_until(lambda: not _kill(self.processes(node)), 30, f"all processes of {node} have ended")

    def restart_head(self) -> None:
        """Kill the head as a power failure does, and start a new cluster without the old one's state at the same address."""
        self.kill_node(self.nodes[0])
        # The other nodes end by themselves. A head that started while they run would refuse them as nodes of another cluster.
        wait_until(lambda: not any(_is_raylet(pid) for pid in self.processes()), 90, "the raylets of all nodes have ended")
        for node in self.nodes:
            self.kill_node(node)
        self.start()

    def kill_raylet(self, node: str) -> None:
        """Kill only Ray's daemon (the raylet) of a node."""
        for pid in self.processes(node):
            if _is_raylet(pid):
                _kill([pid])

    def ask(self, name: str, **arguments: Any) -> Any:
        """Call a method of ``cluster_program.Cluster`` in distflow's program for Ray, which is started if it does not run.

        If the program was killed, it is started again and the call is repeated.

        Returns the method's result.
        """
        try:
            return self._program.ask(name, **arguments)
        except NodeUnreachable:  # the program was killed
            return self._program.ask(name, **arguments)

    def run(self, code: str) -> str:
        """Run Python code in which the module ``ray`` is connected to the cluster, and return its output.

        One process runs all code, because each process that imports Ray and connects needs a second of processor time.
        """
        if self._runner is None or self._runner.poll() is not None:
            with (self.folder / "runner.log").open("ab") as log:
                self._runner = subprocess.Popen(
                    [self.python, "-c", _RUNNER, self.address],
                    stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True,
                    cwd=self.folder, env=self._environment,
                )  # fmt: skip
        stdin, stdout = cast("tuple[IO[str], IO[str]]", (self._runner.stdin, self._runner.stdout))
        print(json.dumps(code), file=stdin, flush=True)
        is_answered, _, _ = select.select([stdout], [], [], 60)
        answer = stdout.readline() if is_answered else ""
        if not answer:
            self._close_runner()
            log_text = (self.folder / "runner.log").read_text()[-2000:]
            raise RuntimeError(f"the code failed, or did not finish within 60 s; the end of runner.log: {log_text}")
        return str(json.loads(answer))

    def _close_programs(self) -> None:
        self._program.close()
        self._close_runner()

    def _close_runner(self) -> None:
        if self._runner is not None:
            self._runner.kill()
            self._runner.communicate()
            self._runner = None

    def kill_programs(self) -> int:
        """Kill distflow's programs that are connected to this cluster, including that of ``ask``, and return their number."""
        # The end of the command line of `ClusterProgram`.
        mark = f"'distflow', 'exec'))\0{self.address}\0"
        found = [int(name) for name in os.listdir("/proc") if name.isdigit() and mark in _command(int(name))]
        return len(_kill(found))

    def allocations(self) -> list[str]:
        """Return the ids of distflow's placement groups that still exist."""
        return sorted(self.ask("allocations"))

    def await_empty(self, timeout: float = 30) -> None:
        """Wait until no placement groups and no resident programs of distflow are left."""
        what = "no placement group or resident program of distflow is left in Ray"
        wait_until(lambda: not self.allocations() and not self.residents(), timeout, what)

    def remove_all(self) -> None:
        """Remove distflow's placement groups and resident programs. The next test begins with an idle cluster."""
        self.ask("release", ids=self.allocations())
        self.await_empty()

    def residents(self, node: str = "") -> list[int]:
        """Return the process ids of distflow's resident programs (``runtime.services.resident``), on one node or on all."""
        # The arguments with which `cluster_program.py` starts them.
        return [pid for pid in self.processes(node) if "\0tied\0distflow-" in _command(pid)]

    def processes(self, node: str = "") -> list[int]:
        """Return the ids of the cluster's processes, including actors, on one node or on all."""
        mark = f"\0{_MARK}={self._name}/{node}".encode()
        found = []
        for name in os.listdir("/proc"):
            if name.isdigit() and is_alive(int(name)):
                with contextlib.suppress(OSError):
                    text = b"\0" + Path("/proc", name, "environ").read_bytes() + b"\0"
                    if mark + b"\0" in text if node else mark in text:
                        found.append(int(name))
        return found

    def _is_up(self, node: str) -> bool:
        daemon = self._daemons[node]
        if daemon.poll() is not None:
            raise RuntimeError(
                f"Ray on node {node} ended; its log ends with: {(self.folder / f'{node}.log').read_text()[-2000:]}"
            )
        try:
            with socket.create_connection((self.address.partition(":")[0], self._port), timeout=1):
                pass
            return any(one["name"] == node and one["is_alive"] for one in self.ask("nodes"))
        except (OSError, DistflowError):
            return False


def _own_address() -> str:
    """Return the address that Ray chooses for this machine: the address on the route to other networks."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one:
        try:
            one.connect(("8.8.8.8", 80))  # sends nothing
            return str(one.getsockname()[0])
        except OSError:
            return "127.0.0.1"


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text(errors="replace")
    except OSError:
        return ""


def _is_raylet(pid: int) -> bool:
    return "/raylet\0" in _command(pid)[:4096]


def _kill(pids: list[int]) -> list[int]:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return pids
