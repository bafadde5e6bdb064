"""Measure from the start of ``distflow run train.py --hostfile hosts.txt`` to the first line of the training, on 2 SSH hosts.

The peer does the same by hand: it copies the directory to each host with ``tar`` over ``ssh``, and starts the same program with
``python -m torch.distributed.run`` over ``ssh``. Both import the same torch, twice on each host: in torchrun and in the rank.
The first measurement removes distflow's files from the hosts and its state before each run, like the first use of a new user.
Fails if distflow takes more than 1.3 × the time of the peer.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

from lab import Lab, alternate, show

from distflow.testing.daemons import free_port

HOSTS = 2
RUNS = 3
LIMIT = 1.3
TRAIN = """\
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
torch.manual_seed(dist.get_rank())
for step in range(1, 11):
    samples = torch.randn(64, 8)
    loss = (model(samples) - samples.sum(dim=1, keepdim=True)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if dist.get_rank() == 0:
        print(f"step {step}: loss {loss.item():.4f}", flush=True)
if dist.get_rank() == 0:
    torch.save(model.module.state_dict(), "outputs/model.pt")
dist.destroy_process_group()
"""


def main() -> int:
    """Run the measurements. Return 0 if the limit is met, 1 otherwise."""
    missed = False
    with tempfile.TemporaryDirectory() as folder, Lab(HOSTS) as lab:
        project = Path(folder)
        (project / "train.py").write_text(TRAIN)
        (project / "hosts.txt").write_text("".join(f"{name}\n" for name in lab.names))
        lab.environment |= {"DISTFLOW_CONFIG": str(_with_default_pool(lab))}
        for title, settle in (("first use", partial(_forget, lab)), ("later uses", lambda: None)):
            contestants = {"plain loop": partial(_plain, lab, project), "distflow": partial(_distflow, lab, project)}
            taken = alternate(contestants, runs=RUNS, settle=settle)
            ratios = show(f"first line of a training on {HOSTS} hosts, {title}, {RUNS} runs", taken, "plain loop")
            missed = missed or ratios["distflow"] > LIMIT
    return int(missed)


def _with_default_pool(lab: Lab) -> Path:
    """Write a configuration whose default pool is ``lab``, so that each host keeps its own root on this machine."""
    text = (lab.folder / "distflow.yaml").read_text()
    path = lab.folder / "default.yaml"
    path.write_text(f"default_pool: lab\n{text}")
    return path


def _distflow(lab: Lab, project: Path) -> float:
    return _first_line(lab, [sys.executable, "-m", "distflow", "run", "train.py", "--hostfile", "hosts.txt"], project)


def _plain(lab: Lab, project: Path) -> float:
    master = lab.servers[lab.names[0]].address
    rendezvous = f"--nnodes {HOSTS} --nproc-per-node 1 --master-addr {master} --master-port {free_port(master)}"
    lines = [
        f"(tar c . | {lab.ssh} {name} 'mkdir -p {lab.folder}/{name}/plain/outputs && tar x -C {lab.folder}/{name}/plain'\n"
        f"{lab.ssh} {name} 'cd {lab.folder}/{name}/plain && GLOO_SOCKET_IFNAME=lo OMP_NUM_THREADS=1 {sys.executable} "
        f"-m torch.distributed.run {rendezvous} --node-rank {rank} train.py') & all+=($!)"
        for rank, name in enumerate(lab.names)
    ]
    script = "all=()\n" + "\n".join(lines) + '\nfor one in "${all[@]}"; do wait "$one"; done\n'
    return _first_line(lab, ["bash", "-euc", script], project)


def _first_line(lab: Lab, command: list[str], project: Path) -> float:
    """Run a command to its end, and return the seconds until it printed the first line of the training."""
    begin = time.perf_counter()
    with subprocess.Popen(
        command, cwd=project, env=lab.environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    ) as process:  # fmt: skip
        try:
            assert process.stdout is not None
            seconds = next((time.perf_counter() - begin for line in process.stdout if "step 1:" in line), None)
            _, errors = process.communicate(timeout=300)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    if process.returncode != 0 or seconds is None:
        raise RuntimeError(f"{command[:4]}: exit code {process.returncode}\n{errors[-2000:]}")
    return seconds


def _forget(lab: Lab) -> None:
    """Remove the files on the hosts, and distflow's state. Its supervisor has ended with the last workflow."""
    for path in (lab.folder / "state", *lab.folder.glob("host*/plain"), *lab.folder.glob("host*/root")):
        shutil.rmtree(path, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
