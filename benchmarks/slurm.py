"""Measure gangs on a real Slurm cluster of two nodes: from submit to the end of one all-reduce, and a long queue.

1. Four contestants start on the login node, which is this machine, and end when they have the result of one all-reduce on two
   nodes: a script for ``sbatch`` with ``srun torchrun`` (the peer), a spec for distflow with ``launcher: torchrun``, a program
   with ``distflow.run``, and a program with submitit. Both programs run the same function. submitit starts a wrapper with
   ``srun`` and without a launcher. The wrapper sets the variables of torch (``TorchDistributedEnvironment``), and calls the
   function. Fails if the spec takes more than 1.15 × the time of the script. ``make`` does not install submitit:
   ``pip install submitit==1.5.4``.
2. 100 workflows wait in the queue of the cluster, which distflow reaches over SSH. The script prints the processor time of the
   supervisor, its calls of Slurm in a minute, and its connections to the login node. Fails for more than 12 calls of
   ``squeue``, or 4 connections.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tempfile
import textwrap
import time
from functools import partial
from pathlib import Path

from lab import alternate, show, write_all_reduce

from distflow.testing.slurm import Slurm
from distflow.testing.sshd import Sshd
from distflow.testing.waiting import wait_until

RUNS = 11
LIMIT = 1.15
QUEUE = 100
MOST_CALLS = 12
MOST_CONNECTIONS = 4
BATCH = """#!/bin/sh
#SBATCH --nodes=2 --ntasks-per-node=1 --output={folder}/slurm.out
export GLOO_SOCKET_IFNAME=lo
port=$((20000 + SLURM_JOB_ID % 10000))
srun sh -c "{python} -m torch.distributed.run --nnodes 2 --nproc-per-node 1 --node-rank \\$SLURM_NODEID \
--master-addr 127.0.0.1 --master-port $port {script}"
"""
FUNCTION = """
def total(scale):
    import torch, torch.distributed as dist
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    one = torch.ones(1) * scale
    dist.all_reduce(one)
    return one.item()
"""
DISTFLOW = """
import distflow
results = distflow.run(total, args=(3,), nodes=2, gpus=0, ranks=1, pool="cluster")
assert list(results) == [6.0, 6.0]
"""
SUBMITIT = """
import os, socket, submitit
def job(scale, port):
    submitit.helpers.TorchDistributedEnvironment().export()
    # The nodes have no host names. If the port of submitit were in use, the other rank would wait until the job's time limit.
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
    return total(scale)
with socket.socket() as probe:
    probe.bind(("127.0.0.1", 0))
    port = probe.getsockname()[1]
executor = submitit.SlurmExecutor(folder="../submitit")
executor.update_parameters(nodes=2, ntasks_per_node=1, time=5)
job = executor.submit(job, 3, port)
assert job.results() == [6.0, 6.0]
"""
WAIT = """
workflow:
  name: wait
  tasks:
  - {name: task, command: ["true"], resource: whole}
  resources: {whole: {cpu: 16}}
"""


class Bench:
    """Runs distflow, with its own state directory, and other programs on the cluster."""

    def __init__(self, folder: Path, cluster: Slurm) -> None:
        self.folder = folder
        self.cluster = cluster
        self.project = folder / "project"
        self.project.mkdir()
        self.calls = folder / "calls"
        # Wrappers record each call of Slurm as a line in the file `calls`.
        commands = folder / "bin"
        commands.mkdir()
        for name in ("sbatch", "squeue", "scontrol", "scancel", "srun"):
            (commands / name).write_text(f'#!/bin/sh\necho {name} >>{self.calls}\nexec {cluster.commands}/{name} "$@"\n')
            (commands / name).chmod(0o755)
        self.environment = os.environ | {
            "PATH": f"{commands}:{os.environ['PATH']}",
            "DISTFLOW_STATE": str(folder / "state"),
            "DISTFLOW_CONFIG": str(folder / "distflow.yaml"),
        }
        self.login = Sshd(folder / "login", "127.0.1.9", alias="login", options={"SetEnv": f"PATH={self.environment['PATH']}"})
        self.configure()

    def configure(self, **settings: str) -> None:
        """Write the configuration of distflow, with further settings of the pool."""
        lines = [f"    {name}: {value}" for name, value in settings.items()]
        (self.folder / "distflow.yaml").write_text(
            f"pools:\n  cluster:\n    backend: slurm\n    root: {self.folder}/node\n    python: {sys.executable}\n"
            "    environment: {GLOO_SOCKET_IFNAME: lo}\n" + "\n".join([*lines, ""])
        )

    def run(self, *words: str) -> None:
        """Run a command to its end."""
        done = subprocess.run(
            words, env=self.environment, cwd=self.project, capture_output=True, text=True, timeout=600, check=False
        )
        if done.returncode:
            raise RuntimeError(f"{words}: exit code {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")

    def submit(self, spec: str, *options: str) -> None:
        """Submit a spec."""
        (self.folder / "spec.yaml").write_text(spec)
        self.run(sys.executable, "-m", "distflow", "submit", str(self.folder / "spec.yaml"), *options)

    def program(self, name: str, text: str) -> None:
        """Run a program with the function."""
        path = self.project / f"with_{name}.py"
        path.write_text(FUNCTION + "if __name__ == '__main__':" + textwrap.indent(text, "    "))
        self.run(sys.executable, str(path))

    def batch(self, script: str) -> None:
        """Submit a script and wait for its end."""
        job = self.cluster.run("sbatch", "--parsable", stdin=script).strip()

        def state() -> str:
            return self.cluster.run("squeue", "-h", "-t", "all", "-j", job, "-o", "%T").strip()

        wait_until(lambda: state() not in ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING"), 120)
        if state() != "COMPLETED":
            raise RuntimeError(f"{state()}: {(self.folder / 'slurm.out').read_text()[-2000:]}")


def main() -> int:
    """Run the measurements. Return 0 if the limits are met, 1 otherwise."""
    with tempfile.TemporaryDirectory(prefix="bench-") as name, Slurm(Path(name) / "cluster") as cluster:
        folder = Path(name)
        script, spec = write_all_reduce(folder)
        bench = Bench(folder, cluster)
        given = {"python": sys.executable, "script": script, "folder": folder}
        contestants = {
            "sbatch with srun torchrun": partial(bench.batch, BATCH.format(**given)),
            "distflow, spec": partial(bench.submit, spec, "--wait"),
            "distflow.run": partial(bench.program, "distflow", DISTFLOW),
        }
        if importlib.util.find_spec("submitit") is None:
            print("submitit is not installed, so distflow is not compared with it: pip install submitit==1.5.4")
        else:
            contestants["submitit"] = partial(bench.program, "submitit", SUBMITIT)
        ratios = show(
            f"one all-reduce on two nodes of a Slurm cluster, {RUNS} runs",
            alternate(contestants, runs=RUNS),
            "sbatch with srun torchrun",
        )
        calls, connections = _queue(bench)
    return int(ratios["distflow, spec"] > LIMIT or calls > MOST_CALLS or connections > MOST_CONNECTIONS)


def _queue(bench: Bench) -> tuple[int, int]:
    """Fill the queue. Return the calls of ``squeue`` in one minute, and the maximum number of connections to the login node."""
    bench.configure(login="login", ssh_config=str(bench.login.client_config))
    with bench.login:
        blocker = bench.cluster.run("sbatch", "--parsable", "-N2", "-c16", "--output=/dev/null", "--wrap=sleep 3600").strip()
        for _ in range(QUEUE):
            bench.submit(WAIT)
        wait_until(lambda: len(bench.cluster.jobs()) == QUEUE + 1, 300)
        (pid,) = [
            int(entry.name)
            for entry in Path("/proc").iterdir()
            if entry.name.isdigit() and f"{bench.folder}/state".encode() in _command(entry) and b"supervisor" in _command(entry)
        ]
        bench.calls.write_text("")
        before, begin, connections = _cpu_s(pid), time.perf_counter(), [0]

        def is_over() -> bool:
            connections.append(bench.login.connections())
            return time.perf_counter() - begin > 60

        wait_until(is_over, 90)
        calls = bench.calls.read_text().split()
        print(f"{QUEUE} workflows in the queue for 60 s")
        print(f"  processor time of the supervisor   {_cpu_s(pid) - before:.2f} s")
        print(f"  calls of Slurm                     {len(calls)} ({calls.count('squeue')} squeue)")
        print(f"  connections to the login node      {max(connections)}")
        bench.run(sys.executable, "-m", "distflow", "stop", *[f"wait-{number}" for number in range(1, QUEUE + 1)])
        bench.cluster.run("scancel", blocker)
        wait_until(lambda: not bench.cluster.jobs(), 120)
        wait_until(lambda: not bench.login.connections(), 120)
    return calls.count("squeue"), max(connections)


def _command(entry: Path) -> bytes:
    try:
        return (entry / "cmdline").read_bytes()
    except OSError:
        return b""


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    sys.exit(main())
