"""Measure from submit to the end of one all-reduce on 2 and on 8 SSH hosts, compared with loops of ``ssh`` in the same run.

The peers are the loop ``ssh host 'RANK=… python one.py' &`` with all variables set by hand, and the same loop with torchrun.
distflow also sends the script, chooses the port, checks the layout, mirrors the output and supervises the tasks. Fails if
distflow takes more than 1.1 × the plain loop, or longer than torchrun.
"""

from __future__ import annotations

import sys
import tempfile
from functools import partial
from pathlib import Path

from lab import Lab, alternate, show

from distflow.testing.daemons import free_port

RUNS = 3
LIMIT = 1.1
ONE = """
import os, torch, torch.distributed as dist
dist.init_process_group("gloo")
one = torch.ones(1)
dist.all_reduce(one)
assert one.item() == dist.get_world_size() == int(os.environ["WORLD_SIZE"])
dist.destroy_process_group()
"""
SPEC = """
workflow:
  name: one
  groups:
  - name: all
    tasks:
    - name: master
      lead: true
      ranks: {{size: 1}}
      command: [{python}, /one.py]
      files: [{{path: /one.py, localpath: {script}}}]
    - name: worker
      replicas: {workers}
      ranks: {{size: 1}}
      command: [{python}, /one.py]
      files: [{{path: /one.py, localpath: {script}}}]
"""


def main() -> int:
    """Run the measurements. Return 0 if the limits are met, 1 otherwise."""
    missed = False
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "one.py"
        script.write_text(ONE)
        for hosts in (2, 8):
            with Lab(hosts) as lab:
                spec = SPEC.format(python=sys.executable, script=script, workers=hosts - 1)
                ratios = show(
                    f"one all-reduce on {hosts} hosts, {RUNS} runs",
                    alternate(
                        {
                            "plain loop": partial(_plain, lab, hosts, script),
                            "torchrun loop": partial(_torchrun, lab, hosts, script),
                            "distflow": partial(lab.submit, spec),
                        },
                        runs=RUNS,
                    ),
                    "plain loop",
                )
                missed = missed or ratios["distflow"] > LIMIT or ratios["distflow"] > ratios["torchrun loop"]
    return int(missed)


def _plain(lab: Lab, hosts: int, script: Path) -> None:
    master = lab.servers[lab.names[0]].address
    common = f"WORLD_SIZE={hosts} MASTER_ADDR={master} MASTER_PORT={free_port(master)} GLOO_SOCKET_IFNAME=lo"
    lines = [
        f"{lab.ssh} {name} 'RANK={rank} LOCAL_RANK=0 {common} {sys.executable} {script}' & all+=($!)"
        for rank, name in enumerate(lab.names)
    ]
    lab.shell("all=()\n" + "\n".join(lines) + '\nfor one in "${all[@]}"; do wait "$one"; done\n')


def _torchrun(lab: Lab, hosts: int, script: Path) -> None:
    master = lab.servers[lab.names[0]].address
    rendezvous = f"--nnodes {hosts} --nproc-per-node 1 --master-addr {master} --master-port {free_port(master)}"
    lines = [
        f"{lab.ssh} {name} 'GLOO_SOCKET_IFNAME=lo {sys.executable} -m torch.distributed.run {rendezvous} --node-rank {rank} "
        f"{script}' & all+=($!)"
        for rank, name in enumerate(lab.names)
    ]
    lab.shell("all=()\n" + "\n".join(lines) + '\nfor one in "${all[@]}"; do wait "$one"; done\n')


if __name__ == "__main__":
    sys.exit(main())
