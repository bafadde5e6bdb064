"""Measure the time from a fault to the end of all ranks: two SSH hosts with two ranks each (gloo), compared with torchrun.

``kill``: one rank gets SIGKILL. Measures the time until no rank is left on any host, for distflow with a supervisor and for
distflow whose supervisor was killed before. Fails if a median is 1 s or more, or not below torchrun's.

``cut``: the link of one host is cut. Measures the time until no rank is left on the other host. Fails if distflow needs more
than ``node_lost_after`` + 2 s. torchrun gets five minutes. Needs root, because the hosts are in network namespaces.
"""

from __future__ import annotations

import contextlib
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from lab import Lab, show

from distflow.state.directory import StateDirectory
from distflow.supervisor.process import is_running
from distflow.testing.daemons import free_port
from distflow.testing.kernel import NetnsHost, Network, missing_netns
from distflow.testing.waiting import wait_until

RUNS = 5
LOST_AFTER_S = 10
WATCHED_S = 300.0
PORT = 29511
"""A fixed port: the hosts have a network of their own."""
MARK = "rank-of-failure-benchmark"

TRAIN = f"""
import os, sys, torch, torch.distributed as dist, torch.multiprocessing as mp

def work(local, offset, size, world):
    rank = offset + local
    open("/proc/self/comm", "w").write(f"rank-{{rank}}")
    os.environ["GLOO_SOCKET_IFNAME"] = os.environ.get("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", rank=rank, world_size=world)
    if rank == 0:
        print("training", flush=True)
    while True:
        dist.all_reduce(torch.ones(1000))

if __name__ == "__main__":  # {MARK}
    if "RANK" in os.environ:  # torchrun
        work(0, int(os.environ["RANK"]), 1, int(os.environ["WORLD_SIZE"]))
    offset, size, world = (int(word) for word in sys.argv[1:])
    mp.spawn(work, args=(offset, size, world), nprocs=size)
"""
SPEC = """
workflow:
  name: failing
  groups:
  - name: train
    tasks:
    - name: master
      lead: true
      ranks: {{offset: 0, size: 2}}
      command: [{python}, {script}, '0', '2', '4']
    - name: worker
      ranks: {{offset: 2, size: 2}}
      command: [{python}, {script}, '2', '2', '4']
"""


def ranks(script: Path, among: set[int] | None = None) -> dict[int, int]:
    """Return the rank of each process of the training by its pid, -1 for a launcher. ``among`` restricts the pids."""
    found = {}
    for entry in os.scandir("/proc"):
        if not entry.name.isdigit():
            continue
        with contextlib.suppress(OSError):
            command = Path(entry.path, "cmdline").read_bytes()
            state = Path(entry.path, "stat").read_text().rpartition(")")[2].split()[0]
            if state in "ZX" or (among is not None and int(entry.name) not in among):
                continue
            name = Path(entry.path, "comm").read_text().strip()
            if name.startswith("rank-") or os.fsencode(script) in command:
                found[int(entry.name)] = int(name[5:]) if name.startswith("rank-") else -1
    return found


def until_gone(script: Path, begin: float, limit_s: float, among: set[int] | None = None) -> float:
    """Return the seconds from ``begin`` until no rank and no launcher is left, at most ``limit_s``."""
    while (took := time.perf_counter() - begin) < limit_s:
        if not ranks(script, among):
            return took
        time.sleep(0.005)  # noqa: TID251  a short interval, because this is the accuracy of the measurement
    return limit_s


def guards(folder: Path) -> list[int]:
    """Return the pids of the runners and keepers of the hosts in a folder."""
    found = []
    for name in os.listdir("/proc"):
        with contextlib.suppress(OSError):
            is_ours = name.isdigit() and os.fsencode(folder) in Path("/proc", name, "cmdline").read_bytes()
            if is_ours and Path("/proc", name, "comm").read_text().startswith(("df-runner", "df-keeper")):
                found.append(int(name))
    return found


def kill_all(find: Callable[[], Iterable[int]]) -> None:
    """Kill the found processes until none was found for a second, because a launcher can still start ranks; at most 30 s."""
    begin = last = time.monotonic()
    while time.monotonic() < min(last + 1.0, begin + 30.0):
        for pid in find():
            last = time.monotonic()
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)  # noqa: TID251  no event reports the start of a process


@contextmanager
def ending(lab: Lab, script: Path) -> Iterator[None]:
    """Use the lab, and afterwards end all processes of the training, of distflow and of the hosts, also after an error."""
    with ExitStack() as last, lab:
        last.callback(kill_all, lambda: [*guards(lab.folder), *ranks(script)])
        lab.stack.callback(kill_supervisor, lab)
        yield


def kill_supervisor(lab: Lab) -> None:
    """Kill the supervisor if one is running."""
    directory = StateDirectory(Path(lab.environment["DISTFLOW_STATE"]))
    if is_running(directory):
        os.kill(int(directory.lock.read_text().split()[0]), signal.SIGKILL)


@contextmanager
def torchrun(lab: Lab, script: Path, master: str, port: int, interface: str = "lo") -> Iterator[None]:
    """Run the training with torchrun on two hosts."""
    words = f"-m torch.distributed.run --nnodes 2 --nproc-per-node 2 --master-addr {master} --master-port {port}"
    start = f"GLOO_SOCKET_IFNAME={interface} {sys.executable} {words} {{rank}} {script}"
    commands = [f"exec {lab.ssh} {name} '{start.format(rank=f'--node-rank {rank}')}'" for rank, name in enumerate(lab.names)]
    null = subprocess.DEVNULL
    clients = [subprocess.Popen(["bash", "-c", command], env=lab.environment, stdout=null, stderr=null) for command in commands]
    try:
        wait_until(lambda: sorted(rank for rank in ranks(script).values() if rank >= 0) == [0, 1, 2, 3], 120, "4 ranks train")
        time.sleep(1.0)  # noqa: TID251  the first all-reduce has begun
        yield
    finally:
        for client in clients:
            client.kill()
            client.wait()
        kill_all(lambda: ranks(script))


@contextmanager
def distflow(lab: Lab, script: Path, *, supervised: bool = True) -> Iterator[None]:
    """Run the training with distflow on two hosts. If not ``supervised``, kill the supervisor when the ranks train."""
    path = lab.folder / "spec.yaml"
    path.write_text(SPEC.format(python=sys.executable, script=script))
    run = [sys.executable, "-m", "distflow", "workflow"]
    done = subprocess.run([*run, "submit", str(path)], env=lab.environment, capture_output=True, text=True, check=True)
    workflow = done.stdout.split()[0]
    try:
        wait_until(lambda: sorted(rank for rank in ranks(script).values() if rank >= 0) == [0, 1, 2, 3], 120, "4 ranks train")
        time.sleep(1.0)  # noqa: TID251  the first all-reduce has begun
        if not supervised:
            kill_supervisor(lab)
        yield
    finally:
        command = [*run, "cancel", workflow, "--force", "--wait", "60"]
        subprocess.run(command, env=lab.environment, cwd=lab.folder, capture_output=True, check=False)


def kill(folder: Path) -> bool:
    """Measure the time after SIGKILL of a rank. Return whether the limit is met."""
    script = folder / "train.py"
    script.write_text(TRAIN)
    lab = Lab(2)
    with ending(lab, script):
        master = lab.servers[lab.names[0]].address
        contestants: dict[str, Callable[[], contextlib.AbstractContextManager[None]]] = {
            "torchrun": lambda: torchrun(lab, script, master, free_port(master)),
            "distflow": lambda: distflow(lab, script),
            "distflow, its supervisor killed": lambda: distflow(lab, script, supervised=False),
        }
        taken: dict[str, list[float]] = {name: [] for name in contestants}
        for _ in range(RUNS):
            for name, start in contestants.items():
                with start():
                    victim = next(pid for pid, rank in ranks(script).items() if rank == 3)
                    begin = time.perf_counter()
                    os.kill(victim, signal.SIGKILL)
                    taken[name].append(until_gone(script, begin, WATCHED_S))
    ratios = show(f"from SIGKILL of a rank to none left on two hosts, {RUNS} runs", taken, "torchrun")
    ours = [name for name in taken if name != "torchrun"]
    return all(statistics.median(taken[name]) < 1.0 and ratios[name] < 1.0 for name in ours)


class CutLab(Lab):
    """Two hosts in network namespaces."""

    def start(self, key: Path, starting: ExitStack) -> None:
        """Start the hosts, and write the configurations."""
        network = starting.enter_context(Network())
        self.hosts: dict[str, NetnsHost] = {
            name: network.host(self.folder / name, alias=name, user_key=key) for name in self.names
        }
        self.servers = {name: host.sshd for name, host in self.hosts.items()}
        self.write(node_lost_after=f"{LOST_AFTER_S}s", connect_timeout="2s", ping="1s", peer_failed_grace="1s")

    def __exit__(self, *_: object) -> None:
        """Wait until the supervisor has stopped the tasks of the lost node, then remove the hosts in any case."""
        with self.stack:
            wait_until(lambda: not guards(self.folder), 60, "no task runs on the hosts")


def cut(folder: Path) -> bool:
    """Measure the time after the cut of a link. Return whether the limit is met."""
    script = folder / "train.py"
    script.write_text(TRAIN)
    taken: dict[str, float] = {}
    lab = CutLab(2)
    with ending(lab, script):
        near, far = lab.hosts.values()
        contestants: dict[str, Callable[[], contextlib.AbstractContextManager[None]]] = {
            "torchrun": lambda: torchrun(lab, script, near.address, PORT, "eth0"),
            "distflow": lambda: distflow(lab, script),
        }
        for name, start in contestants.items():
            with start():
                on_near = {pid for pid in ranks(script) if _namespace(pid) == _namespace_of(near)}
                begin = time.perf_counter()
                far.cut()
                taken[name] = until_gone(script, begin, WATCHED_S, on_near)
                far.heal()
    print(
        "time from the cut of a host's network link to the end of all ranks on the other host "
        f"(node_lost_after {LOST_AFTER_S} s)"
    )
    for name, took in taken.items():
        shown = f"{took:>7.2f} s" if took < WATCHED_S else f"still running after {WATCHED_S:g} s"
        print(f"  {name:<34} {shown}", flush=True)
    return taken["distflow"] <= LOST_AFTER_S + 2.0


def _namespace(pid: int) -> str:
    with contextlib.suppress(OSError):
        return str(os.stat(f"/proc/{pid}/ns/net").st_ino)
    return ""


def _namespace_of(host: NetnsHost) -> str:
    return str(os.stat(f"/run/netns/{host.namespace}").st_ino)


def main() -> int:
    """Run both measurements. Return 0 if the limits are met, 1 otherwise."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped by SIGTERM"))  # so that all started processes end, too
    with tempfile.TemporaryDirectory() as folder:
        holds = kill(Path(folder))
        if why := missing_netns():
            print(f"cannot measure a cut link: {why}")
        else:
            holds = cut(Path(folder)) and holds
    return int(not holds)


if __name__ == "__main__":
    sys.exit(main())
