"""Measure a function that all-reduces on 2 SSH hosts, from the start of the program to its end, compared with torchrunx.

The programs are equal except for the launcher: ``distflow.run`` or ``torchrunx.Launcher`` with the backend gloo. Fails if
distflow takes longer. ``make`` does not install torchrunx: ``pip install torchrunx==0.4.0``. Without it, nothing is measured.
torchrunx waits forever on hosts whose own name resolves to 127.0.1.1. In that case, only the time of distflow is shown. On
loopback addresses, torchrunx starts its agents without SSH, so it makes two connections fewer than distflow.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import textwrap
from collections.abc import Callable
from functools import partial

from lab import Lab, alternate, show

RUNS = 5
LIMIT_S = 60
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
results = distflow.run(total, args=(3,), nodes={hosts}, gpus=0, ranks=1, pool="lab")
assert list(results) == [3.0 * {hosts}] * {hosts}
"""
TORCHRUNX = """
import torchrunx
launcher = torchrunx.Launcher(
    hostnames={addresses}, workers_per_host=1, ssh_config_file="{ssh_config}", backend="gloo",
    extra_env_vars={{"GLOO_SOCKET_IFNAME": "lo"}},
)
results = launcher.run(total, 3)
assert [results.rank(rank) for rank in range({hosts})] == [3.0 * {hosts}] * {hosts}
"""


def main() -> int:
    """Run the measurement. Return 1 if distflow is slower, otherwise 0, also if torchrunx is missing or does not finish."""
    if importlib.util.find_spec("torchrunx") is None:
        print("torchrunx is not installed, so functions are not compared with it: pip install torchrunx==0.4.0")
        return 0
    with Lab(2) as lab:
        values = {
            "hosts": len(lab.names),
            "addresses": [server.address for server in lab.servers.values()],
            "ssh_config": lab.ssh_config,
        }
        programs = {"torchrunx": TORCHRUNX, "distflow.run": DISTFLOW}
        contestants: dict[str, Callable[[], None]] = {}
        for name, text in programs.items():
            path = lab.folder / "project" / f"with_{name}.py"  # a file torchrunx.py would hide the package
            path.parent.mkdir(exist_ok=True)
            path.write_text(FUNCTION + "if __name__ == '__main__':" + textwrap.indent(text.format(**values), "    "))
            contestants[name] = partial(_run, lab, path.name)
        try:
            contestants["torchrunx"]()
        except subprocess.TimeoutExpired:
            print("torchrunx did not finish")
            del contestants["torchrunx"]
        peer = next(iter(contestants))
        ratios = show(f"one all-reduce of a function on 2 hosts, {RUNS} runs", alternate(contestants, runs=RUNS), peer)
    return int(ratios["distflow.run"] > 1.0)


def _run(lab: Lab, program: str) -> None:
    done = subprocess.run(
        [sys.executable, program],
        env=lab.environment,
        cwd=lab.folder / "project",
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    if done.returncode != 0:
        raise RuntimeError(f"{program}: exit code {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")


if __name__ == "__main__":
    sys.exit(main())
