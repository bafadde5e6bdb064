"""Measure gangs on a real Slurm cluster of two nodes: from submit to the end of one all-reduce, and a long queue.

1. The peer is a script for ``sbatch`` with ``srun torchrun``, whose end ``squeue`` reports. distflow
   takes its way through the login node on this machine. Fails if distflow takes more than 1.15 × the script.
2. 100 workflows wait in the queue of the cluster. Reported are the processor time of the supervisor, and the questions to Slurm
   in a minute. Fails for more than 12.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

from lab import alternate, show

from distflow.testing.slurm import Slurm
from distflow.testing.waiting import wait_until

RUNS = 3
LIMIT = 1.15
QUEUE = 100
MOST_QUESTIONS = 12
ONE = """
import os, torch, torch.distributed as dist
dist.init_process_group("gloo")
one = torch.ones(1)
dist.all_reduce(one)
assert one.item() == dist.get_world_size() == 2
dist.destroy_process_group()
"""
SPEC = """
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
BATCH = """#!/bin/sh
#SBATCH --nodes=2 --ntasks-per-node=1 --output={folder}/slurm.out
export GLOO_SOCKET_IFNAME=lo
port=$((20000 + SLURM_JOB_ID % 10000))
srun sh -c "{python} -m torch.distributed.run --nnodes 2 --nproc-per-node 1 --node-rank \\$SLURM_NODEID \
--master-addr 127.0.0.1 --master-port $port {script}"
"""
WAIT = """
workflow:
  name: wait
  tasks:
  - {name: task, command: ["true"], resource: whole}
  resources: {whole: {cpu: 16}}
"""


class Bench:
    """distflow with its own state directory, and a cluster."""

    def __init__(self, folder: Path, cluster: Slurm) -> None:
        self.folder = folder
        self.cluster = cluster
        self.calls = folder / "calls"
        # Every question to Slurm leaves a line.
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
        (folder / "distflow.yaml").write_text(
            "pools:\n  cluster:\n    backend: slurm\n"
            f"    root: {folder}/node\n    python: {sys.executable}\n    environment: {{GLOO_SOCKET_IFNAME: lo}}\n"
        )

    def run(self, *words: str) -> None:
        """Run a command to its end."""
        done = subprocess.run(
            words, env=self.environment, cwd=self.folder, capture_output=True, text=True, timeout=600, check=False
        )
        if done.returncode:
            raise RuntimeError(f"{words}: exit code {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")

    def submit(self, spec: str, *options: str) -> None:
        """Submit a spec."""
        (self.folder / "spec.yaml").write_text(spec)
        self.run(sys.executable, "-m", "distflow", "submit", str(self.folder / "spec.yaml"), *options)

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
        script = folder / "one.py"
        script.write_text(ONE)
        bench = Bench(folder, cluster)
        given = {"python": sys.executable, "script": script, "folder": folder}
        ratios = show(
            f"one all-reduce on two nodes of a Slurm cluster, {RUNS} runs",
            alternate(
                {
                    "sbatch with srun torchrun": partial(bench.batch, BATCH.format(**given)),
                    "distflow": partial(bench.submit, SPEC.format(**given), "--wait"),
                },
                runs=RUNS,
            ),
            "sbatch with srun torchrun",
        )
        questions = _queue(bench)
    return int(ratios["distflow"] > LIMIT or questions > MOST_QUESTIONS)


def _queue(bench: Bench) -> int:
    """Fill the queue, and return the questions to Slurm in one minute."""
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
    before, begin = _cpu_s(pid), time.perf_counter()
    wait_until(lambda: time.perf_counter() - begin > 60, 90)
    calls = bench.calls.read_text().split()
    print(f"{QUEUE} workflows in the queue for 60 s")
    print(f"  processor time of the supervisor   {_cpu_s(pid) - before:.2f} s")
    print(f"  questions to Slurm                 {len(calls)} ({calls.count('squeue')} squeue)")
    bench.run(sys.executable, "-m", "distflow", "stop", *[f"wait-{number}" for number in range(1, QUEUE + 1)])
    bench.cluster.run("scancel", blocker)
    wait_until(lambda: not bench.cluster.jobs(), 120)
    return len(calls)


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
