"""Hosts for benchmarks: OpenSSH servers on loopback addresses, a distflow configuration, and alternating runs."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path

from distflow.testing.sshd import Sshd, make_key
from distflow.testing.waiting import wait_until

__all__ = ["Lab", "alternate", "show", "write_all_reduce"]

_ALL_REDUCE = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
one = torch.ones(1)
dist.all_reduce(one)
assert one.item() == dist.get_world_size() == 2
dist.destroy_process_group()
"""
_ALL_REDUCE_SPEC = """
workflow:
  name: one
  groups:
  - name: all
    launcher: torchrun
    tasks:
    - name: master
      lead: true
      ranks: {{size: 1}}
      command: &run [{python}, /one.py]
      files: &files [{{path: /one.py, localpath: {script}}}]
    - {{name: worker, ranks: {{size: 1}}, command: *run, files: *files}}
"""


class Lab:
    """A context manager for ``count`` hosts. Each is a real sshd with its own root directory.

    With ``in_memory``, their files are in ``/dev/shm``, because hosts that share one disk wait for each other.
    """

    def __init__(self, count: int, *, in_memory: bool = False) -> None:
        """Choose the names of the hosts; ``__enter__`` starts them."""
        self._parent = "/dev/shm" if in_memory and os.access("/dev/shm", os.W_OK) else None
        self.names = [f"host{number}" for number in range(1, count + 1)]
        self.stack = ExitStack()
        """Its callbacks are called at the end, before the servers are stopped."""

    def __enter__(self) -> Lab:
        """Start the servers, and write the configurations. If that fails, stop the servers that were started."""
        with self.stack as starting:
            self.folder = Path(starting.enter_context(tempfile.TemporaryDirectory(prefix="bench-", dir=self._parent)))
            self.start(make_key(self.folder / "key"), starting)
            self.stack = starting.pop_all()
        return self

    def start(self, key: Path, starting: ExitStack) -> None:
        """Start the servers, which accept ``key``, and write the configurations."""
        self.servers = {}
        for number, name in enumerate(self.names, 1):
            address = f"127.0.{2 + number // 250}.{1 + number % 250}"
            server = Sshd(self.folder / name, address, alias=name, user_key=key)
            self.servers[name] = starting.enter_context(server)
        self.write(peer_failed_grace="1s")

    def write(self, **settings: str) -> None:
        """Write the configurations of ssh and distflow. ``settings`` are keys of the pool."""
        self.ssh_config = self.folder / "ssh_config"
        self.ssh_config.write_text("".join(server.client_stanza(LogLevel="ERROR") for server in self.servers.values()))
        nodes = [
            f"    - {{name: {name}, root: {self.folder}/{name}/root, lease_dir: {self.folder}/{name}/leases}}"
            for name in self.names
        ]
        lines = ["pools:", "  lab:", "    backend: ssh", f"    ssh_config: {self.ssh_config}", f"    python: {sys.executable}"]
        lines += [f"    {name}: {value}" for name, value in settings.items()]
        (self.folder / "distflow.yaml").write_text("\n".join([*lines, "    nodes:", *nodes]) + "\n")
        self.environment = os.environ | {
            "DISTFLOW_STATE": str(self.folder / "state"),
            "DISTFLOW_CONFIG": str(self.folder / "distflow.yaml"),
        }

    def __exit__(self, *_: object) -> None:
        """Wait until all connections are closed, then stop the servers, even if a connection stays open."""
        with self.stack:
            self.settle()

    def settle(self) -> None:
        """Wait until no connection to a host is open."""
        wait_until(lambda: not any(server.connections() for server in self.servers.values()), 60)

    @property
    def ssh(self) -> str:
        """The ssh command with the configuration of the hosts."""
        return f"ssh -F {self.ssh_config}"

    def submit(self, spec: str) -> None:
        """Run ``distflow workflow submit --wait``, including the start and the end of the supervisor."""
        path = self.folder / "spec.yaml"
        path.write_text(spec)
        self._run([sys.executable, "-m", "distflow", "workflow", "submit", str(path), "--wait"])

    def shell(self, script: str) -> None:
        """Run a shell script of the compared program to its end."""
        self._run(["bash", "-euc", script])

    def _run(self, command: list[str]) -> None:
        done = subprocess.run(
            command, env=self.environment, cwd=self.folder, capture_output=True, text=True, timeout=1800, check=False
        )
        if done.returncode != 0:
            raise RuntimeError(f"{command[:4]}: exit code {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")


def write_all_reduce(folder: Path) -> tuple[Path, str]:
    """Write a script that two ranks run for one all-reduce. Return its path, and a spec that runs it in two tasks."""
    script = folder / "one.py"
    script.write_text(_ALL_REDUCE)
    return script, _ALL_REDUCE_SPEC.format(python=sys.executable, script=script)


def alternate(
    contestants: Mapping[str, Callable[[], float | None]],
    *,
    runs: int,
    warm_up: bool = True,
    settle: Callable[[], None] = lambda: None,
) -> dict[str, list[float]]:
    """Run all contestants alternately in ``runs`` turns. Return the seconds of each contestant in each turn.

    Because they alternate, changes of the machine's speed affect all of them. ``settle`` runs before each contestant, and its
    time does not count. With ``warm_up``, an additional first turn does not count. A contestant may measure its seconds itself
    and return them.
    """
    taken: dict[str, list[float]] = {name: [] for name in contestants}
    for turn in range(0 if warm_up else 1, runs + 1):
        for name, action in contestants.items():
            settle()
            begin = time.perf_counter()
            measured = action()
            if turn:
                taken[name].append(time.perf_counter() - begin if measured is None else measured)
    return taken


def show(title: str, taken: Mapping[str, list[float]], peer: str) -> dict[str, float]:
    """Print medians, minima and ratios to ``peer``; return the ratios of the medians."""
    base = statistics.median(taken[peer])
    print(title)
    print(f"  {'':<34} {'median':>9} {'minimum':>9} {'× ' + peer:>20}")
    for name, times in taken.items():
        median = statistics.median(times)
        print(f"  {name:<34} {median:>7.2f} s {min(times):>7.2f} s {median / base:>20.2f}", flush=True)
    return {name: statistics.median(times) / base for name, times in taken.items()}
