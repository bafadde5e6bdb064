"""Compare the training speed of ``workflow_specs/train_dist.py`` under distflow, under torchrun and as a single process.

All three contestants have the same global batch: two distflow tasks of one rank each on this machine, ``torchrun`` with two
ranks, and one process. The three run once in every order. The speed is measured from the end of the first epoch to the end
of the last epoch. The total time is from the start of the command to its end. Fails if the median ratio of distflow's speed to
torchrun's in the same turn is below ``LIMIT``, or that of the total times above ``TOTAL_LIMIT``.

The script then runs ``gpt.py``, which needs a GPU.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import permutations
from pathlib import Path
from typing import Any

SCRIPTS = Path(__file__).resolve().parents[1] / "workflow_specs"
EPOCHS, RANKS, BATCH = 60, 2, 32
LIMIT = 0.98
"""1.0, minus the usual difference between two runs of the same contestant."""
TOTAL_LIMIT = 1.0
TIMED = f"""
import sys, time
sys.path.insert(0, {str(SCRIPTS)!r})
import train_dist

emit = train_dist.emit
train_dist.emit = lambda **record: emit(**record, clock=time.monotonic())
sys.exit(train_dist.main())
"""
"""The training script, with a time stamp in each of its lines."""
SPEC = """
workflow:
  name: sample
  resources: {{default: {{gpu: 0}}}}
  groups:
  - name: training
    tasks:
    - name: master
      lead: true
      ranks: {{size: 1}}
      command: &train [{python}, {script}, --epochs, "{epochs}", --batch_size, "{batch}"]
    - name: worker
      replicas: {workers}
      ranks: {{size: 1}}
      command: *train
"""


def main() -> int:
    """Run both measurements. Return 0 if the limits are met, 1 otherwise."""
    slow = _sample()
    gpt = subprocess.run([sys.executable, Path(__file__).with_name("gpt.py")], check=False).returncode
    return int(slow or gpt != 0)


def _sample() -> bool:
    with tempfile.TemporaryDirectory(prefix="bench-") as name:
        folder = Path(name)
        (folder / "timed.py").write_text(TIMED)
        python = [sys.executable, str(folder / "timed.py"), "--epochs", str(EPOCHS), "--output", str(folder / "out")]
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
        contestants: dict[str, Callable[[], tuple[float, float]]] = {
            f"torchrun, {RANKS} ranks": partial(_measure, [*torchrun, *python[1:], "--batch_size", str(BATCH)], folder),
            f"distflow, {RANKS} ranks": partial(_under_distflow, folder),
            "a single process": partial(_measure, [*python, "--batch_size", str(BATCH * RANKS)], folder),
        }
        results: dict[str, list[tuple[float, float]]] = {contestant: [] for contestant in contestants}
        for run in contestants.values():
            run()  # fill the caches
        # Every order once, because a contestant that runs after the single process is faster: one core was idle before.
        for order in permutations(contestants):
            for contestant in order:
                results[contestant].append(contestants[contestant]())
    print(f"{platform.machine()}, {os.cpu_count()} CPUs: the sample, {EPOCHS} epochs, {len(results[contestant])} runs")
    ratios: dict[str, list[float]] = {}
    for unit, column in (("samples per second", 0), ("seconds in total", 1)):
        print(f"  {unit:<24} {'median':>9} {'minimum':>9} {'maximum':>9} {'× torchrun':>11}")
        measured = {contestant: [result[column] for result in runs] for contestant, runs in results.items()}
        torchrun_values = next(iter(measured.values()))
        ratios[unit] = [_ratio(values, torchrun_values) for values in measured.values()]
        for (contestant, values), ratio in zip(measured.items(), ratios[unit], strict=True):
            median = statistics.median(values)
            print(
                f"  {contestant:<24} {median:>9.{column}f} {min(values):>9.{column}f} {max(values):>9.{column}f} {ratio:>11.2f}"
            )
    return ratios["samples per second"][1] < LIMIT or ratios["seconds in total"][1] > TOTAL_LIMIT


def _ratio(measured: Sequence[float], peers: Sequence[float]) -> float:
    """Return the median of the ratios within each turn, so that changes of the machine's speed cancel out."""
    return statistics.median(one / peer for one, peer in zip(measured, peers, strict=True))


def _measure(command: Sequence[str], folder: Path) -> tuple[float, float]:
    """Return the samples per second and the seconds in total of a command that prints the lines of the training."""
    begun = time.monotonic()
    out = _run(command, folder)
    return _speed(out.splitlines()), time.monotonic() - begun


def _under_distflow(folder: Path) -> tuple[float, float]:
    workers = RANKS - 1
    spec = SPEC.format(python=sys.executable, script=folder / "timed.py", epochs=EPOCHS, batch=BATCH, workers=workers)
    (folder / "spec.yaml").write_text(spec)
    distflow = [sys.executable, "-m", "distflow", "workflow"]
    begun = time.monotonic()
    workflow = _run([*distflow, "submit", str(folder / "spec.yaml"), "--wait"], folder).split()[0]
    seconds = time.monotonic() - begun
    return _speed(_run([*distflow, "logs", workflow, "--task", "master", "--no-prefix"], folder).splitlines()), seconds


def _run(command: Sequence[str], folder: Path) -> str:
    node = f"{{name: local, root: {folder}/node, lease_dir: {folder}/leases}}"
    (folder / "distflow.yaml").write_text(f"pools: {{local: {{backend: local, nodes: [{node}]}}}}\n")
    environment = os.environ | {"DISTFLOW_STATE": str(folder / "state"), "DISTFLOW_CONFIG": str(folder / "distflow.yaml")}
    done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, timeout=900, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{command[:4]}: exit code {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    return done.stdout


def _speed(lines: Sequence[str]) -> float:
    """Return the samples per second of all ranks together, from the lines at the ends of epochs."""
    records: list[dict[str, Any]] = [json.loads(line) for line in lines if line.startswith("{")]
    first, *_, last = [record for record in records if "loss" in record]
    # There are 1437 samples, so the last batch of an epoch is smaller. That is the same for all contestants.
    samples = (last["step"] - first["step"]) * BATCH * RANKS
    return float(samples / (last["clock"] - first["clock"]))


if __name__ == "__main__":
    sys.exit(main())
