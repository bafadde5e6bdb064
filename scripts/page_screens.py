"""Draw the pages of `distflow ui` in light and dark, for docs/ui.md (`make page-screens`).

The script starts three OpenSSH servers on this machine, runs some workflows there, opens the pages in Chromium, and writes
docs/screens/ui-*.png. With --serve, it prints the URL and waits for Ctrl-C instead, so that you can change the page and
reload it.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from scripts.screens import machine_like

from distflow.testing.browser import open_chromium
from distflow.testing.waiting import wait_until
from pages import ROOT, ssh_hosts

if TYPE_CHECKING:
    from playwright.sync_api import Page

SCREENS = ROOT / "docs" / "screens"
NODES = ("gpu-1", "gpu-2", "gpu-3")
SIZE = {"width": 1180, "height": 820}

SCRIPT = """
import json, math, os, random, sys, time
task, first, count, steps, delay, fails_at = sys.argv[1], *map(int, sys.argv[2:5]), float(sys.argv[5]), int(sys.argv[6])
random.seed(first + steps)
decay = 40 + steps % 60
print(f"\\x1b[1m{task}\\x1b[0m: ranks {first}-{first + count - 1} \\x1b[32mready\\x1b[0m", flush=True)
for step in range(1, steps + 1):
    for rank in range(first, first + count):
        step_s = 0.21 + 0.01 * random.random() + 0.12 * (rank == 5)
        one = {"step": step, "rank": rank, "loss": round(2.3 * math.exp(-step / decay) + 0.2 + 0.04 * random.random(), 4),
               "step_s": round(step_s, 4), "samples_per_s": round(64 / step_s, 1), "memory_bytes": 31 * 2**30 + rank * 2**27}
        if rank == 0:
            one |= {"accuracy": round(0.94 - 0.8 * math.exp(-step / 30), 4), "slowest_step_s": 0.34, "stragglers": "5"}
        print(json.dumps(one), flush=True)
    if step % 20 == 0:
        print(f"\\x1b[36mINFO\\x1b[0m saved checkpoint step-{step}", flush=True)
    if step == fails_at:
        print("\\x1b[33mWARN\\x1b[0m allocator: 38.2 GiB of 39.4 GiB in use", flush=True)
        raise RuntimeError("CUDA out of memory. Tried to allocate 2.50 GiB. GPU 1 has 1.12 GiB free.")
    time.sleep(delay)
if first == 0:
    for name, size in (("model.pt", 412_000), ("optimizer.pt", 824_000), ("config.json", 812)):
        with open(os.path.join(sys.argv[7], name), "wb") as file:
            file.write(os.urandom(size))
"""

SPEC = """
workflow:
  name: {{name}}
  labels: {team: vision, model: resnet-50}
  resources: {default: {gpu: 4, cpu: 16}}
  groups:
  - name: prepare
    tasks:
    - {name: shards, command: [bash, -c, 'echo 128 shards; sleep 1; seq 9 > {{output}}/shards.txt']}
  - name: train
    tasks:
    - name: master
      lead: true
      ranks: {size: 4}
      inputs: [{task: shards}]
      files: [&script {path: /train.py, localpath: train.py}]
      command: [python3, -u, /train.py, master, '0', '4', '{{steps}}', '{{delay}}', '0', '{{output}}']
    - name: worker
      ranks: {size: 4}
      inputs: [{task: shards}]
      files: [*script]
      command: [python3, -u, /train.py, worker, '4', '4', '{{steps}}', '{{delay}}', '{{fails_at}}']
  - name: evaluate
    tasks:
    - {name: score, inputs: [{task: master}], command: [bash, -c, 'echo accuracy 0.93; sleep 0.5']}
  - name: export
    tasks:
    - {name: onnx, inputs: [{task: master}], command: [bash, -c, 'echo exported; sleep 0.7']}
default-values: {name: resnet, steps: 120, delay: 0.02, fails_at: 0}
"""

# A replacement of NVIDIA's library for the sampler. Its values are those of a training that computes most of the time.
NVML = r"""
#include <math.h>
#include <string.h>
#include <time.h>
typedef long device;
static double wave(device gpu, double seconds) { return sin(time(0) / seconds + 2.1 * gpu); }
int nvmlInit_v2(void) { return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, device *gpu) { *gpu = index + 1; return 0; }
int nvmlDeviceGetUtilizationRates(device gpu, unsigned *rates) { rates[0] = 91 + 7 * wave(gpu, 9); rates[1] = 55; return 0; }
int nvmlDeviceGetMemoryInfo(device gpu, unsigned long long *memory) {
    memory[0] = 40ull << 30; memory[2] = (31ull << 30) + (gpu << 28); memory[1] = memory[0] - memory[2]; return 0; }
int nvmlDeviceGetPowerUsage(device gpu, unsigned *power) { *power = 362000 + 21000 * wave(gpu, 7); return 0; }
int nvmlDeviceGetEnforcedPowerLimit(device gpu, unsigned *power) { *power = 400000; return 0; }
int nvmlDeviceGetTemperature(device gpu, unsigned sensor, unsigned *degrees) {
    *degrees = 61 + 2 * gpu + 2 * wave(gpu, 20); return 0; }
"""

# gpu-3 has a task of another user, and a program that distflow did not start.
OTHERS = """
import fcntl, json, os, sys
for gpu in range(3):
    lease = os.open(os.path.join(sys.argv[1], f"gpu-{gpu}.lock"), os.O_RDWR | os.O_CREAT)
    fcntl.flock(lease, fcntl.LOCK_EX)
    os.write(lease, json.dumps({"user": "grace", "attempt": "7e/g/w/0", "label": "llama-7/worker"}).encode())
print("locked", flush=True)
sys.stdin.read()
"""
SMI = """#!/bin/sh
case "$1" in
*apps*) echo "GPU-6, PID, python3, 8123";;
-L) for gpu in 0 1 2 3 4 5 6 7; do echo "GPU $gpu: NVIDIA A100-SXM4-40GB (UUID: GPU-$gpu)"; done;;
*) for gpu in 0 1 2 3 4 5 6 7; do echo "$gpu, GPU-$gpu, 00000000:0$gpu:00.0"; done;;
esac
"""

PAGES = {
    "workflows": "#/",
    "workflow": "#/workflows/resnet-1",
    "failure": "#/workflows/resnet-2",
    "log": "#/workflows/resnet-2/logs?task=worker&find=CUDA out of memory",
    "metrics": "#/workflows/resnet-1/metrics",
    "compared": "#/workflows/resnet-1/metrics?with=resnet-wide-1",
    "use": "#/workflows/vit-1/metrics",
    "diagnosis": "#/workflows/resnet-2/diagnosis",
    "events": "#/workflows/resnet-1/events",
    "outputs": "#/workflows/resnet-1/outputs",
    "pools": "#/pools",
}

SCROLLED = {"compared": ".charts >> nth=0", "use": ".part"}
"""The selector of the element at the top of a picture; pictures without an entry begin at the top of the page."""


def with_gpus(folder: Path, node: str) -> str:
    """Write a replacement of NVIDIA's library for a node, and of ``nvidia-smi`` for the last node.

    Return the path of a Python interpreter that uses them.
    """
    tools = folder / node / "tools"
    (tools.parent / "leases").mkdir(parents=True)
    (tools.parent / "leases").chmod(0o1777)
    tools.mkdir()
    (tools / "nvml.c").write_text(NVML)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", tools / "libnvidia-ml.so.1", tools / "nvml.c", "-lm"], check=True)
    if node == NODES[-1]:
        (tools / "nvidia-smi").write_text(SMI.replace("PID", str(os.getpid())))
        (tools / "nvidia-smi").chmod(0o755)
    python = tools / "python"
    python.write_text(f'#!/bin/sh\nexport LD_LIBRARY_PATH={tools} PATH="{tools}:$PATH"\nexec python3 "$@"\n')
    python.chmod(0o755)
    return str(python)


@contextmanager
def example(folder: Path) -> Iterator[str]:
    """Run the workflows of the pictures in a directory, and yield the URL of the page."""
    nodes = [
        {"name": name, "root": str(folder / name / "root"), "gpus": 8, "cpus": 64, "memory": "512Gi", "platform": "a100",
         "check_capacity": False, "python": with_gpus(folder, name), "lease_dir": str(folder / name / "leases")}
        for name in NODES
    ]  # fmt: skip
    pools = {"lab": {"backend": "ssh", "nodes": nodes}, "laptop": {"backend": "local"}}
    (folder / "distflow.yaml").write_text(json.dumps({"default_pool": "lab", "pools": pools}))
    (folder / "train.py").write_text(SCRIPT)
    (folder / "spec.yaml").write_text(SPEC)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "HOME": str(folder), "DISTFLOW_STATE": str(folder / "state"), "LOGNAME": "ada"}
    environment.pop("DISTFLOW_CONFIG", None)

    def run(*arguments: str) -> None:
        subprocess.run(["distflow", *arguments], cwd=folder, env=environment, stdout=subprocess.DEVNULL, check=False)

    def submit(*values: str, wait: bool = True) -> None:
        run("workflow", "submit", "spec.yaml", *(["--wait"] if wait else []), *(["--set", *values] if values else []))

    with ssh_hosts(folder, list(NODES), machine_like(folder)), ExitStack() as stack:
        leases = str(folder / NODES[-1] / "leases")
        others = subprocess.Popen(
            [sys.executable, "-c", OTHERS, leases], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        stack.callback(others.wait)
        assert others.stdin is not None
        assert others.stdout is not None
        stack.callback(others.stdin.close)
        others.stdout.readline()
        submit("name=vit", "steps=100000", "delay=0.5", wait=False)
        submit("delay=0.3", wait=False)
        submit("fails_at=87")
        submit("name=resnet-wide", "steps=150", "delay=0.3")
        run("workflow", "tag", "-w", "resnet-wide-1", "-a", "baseline")
        submit("name=bert", "steps=100000", "delay=0.5", wait=False)
        run("workflow", "cancel", "bert-1", "--wait", "60")
        server = subprocess.Popen(["distflow", "ui"], cwd=folder, env=environment, stdout=subprocess.PIPE, text=True)
        try:
            assert server.stdout is not None
            yield server.stdout.readline().strip()
        finally:
            server.send_signal(signal.SIGINT)
            server.wait()
            run("workflow", "cancel", "vit-1", "--force", "--wait", "60")


def draw(page: Page, url: str, names: Sequence[str]) -> None:
    """Write the pictures of some pages."""
    page.goto(url)
    page.wait_for_selector("main h1")
    for name in names:
        for scheme in ("light", "dark"):
            page.emulate_media(color_scheme=scheme)
            page.goto("about:blank")
            page.goto(url.partition("?")[0] + PAGES[name])
            page.wait_for_selector("html[data-ready]", state="attached")
            page.wait_for_timeout(3000)  # until charts are drawn and nodes have answered
            if name in SCROLLED:
                page.locator(SCROLLED[name]).evaluate("one => scrollTo(0, one.getBoundingClientRect().top - 16)")
            page.screenshot(path=SCREENS / f"ui-{name}-{scheme}.png")
            print(f"docs/screens/ui-{name}-{scheme}.png")


def main() -> None:
    """Run the example, and draw or serve its pages."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", choices=[*PAGES, []], help="pictures; default: all")
    parser.add_argument("--serve", action="store_true", help="print the URL and wait for Ctrl-C, instead of drawing")
    given = parser.parse_args()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have started it in the background
    with tempfile.TemporaryDirectory(prefix="distflow-screens-") as folder, example(Path(folder)) as url:
        if given.serve:
            print(url, flush=True)
            wait_until(lambda: False, 86400)
        with open_chromium(SIZE) as page:
            draw(page, url, given.names or list(PAGES))


if __name__ == "__main__":
    main()
