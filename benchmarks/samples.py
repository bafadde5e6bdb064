"""Measure the CPU time of the sampler on a node, for tasks of 1, 10 and 100 processes.

The processes sleep. A thousand further processes do not belong to the task, as on a large node. The sampler runs as on a node.
Its CPU time is read when it ends, and includes its start. Fails if the sampler uses more than 0.5% of a core.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading

from distflow.runtime.guard import sampler

SIZES = (1, 10, 100)
OTHERS = 1000
SECONDS = 120.0
LIMIT = 0.5
"""Percent of a core."""


def start(count: int) -> subprocess.Popen[bytes]:
    """Start a shell with ``count`` sleeping children, in a new session."""
    script = f"i=0; while [ $i -lt {count} ]; do sleep 3600 & i=$((i+1)); done; echo; wait"
    process = subprocess.Popen(["sh", "-c", script], stdout=subprocess.PIPE, start_new_session=True)
    assert process.stdout is not None
    process.stdout.readline()
    return process


def end(process: subprocess.Popen[bytes]) -> None:
    """Kill a shell and its children."""
    os.killpg(process.pid, 9)
    process.wait()


def measure(root: int, gpus: list[int]) -> tuple[float, int]:
    """Sample the descendants of ``root``. Return the sampler's CPU time in percent of a core, and the number of samples."""
    with tempfile.TemporaryDirectory() as folder:
        fd = os.open(folder, os.O_RDONLY)
        pid = os.fork()
        if pid == 0:
            try:
                sampler.record(fd, root, root, gpus)
            finally:
                os._exit(1)
        threading.Event().wait(SECONDS)
        os.kill(pid, 9)
        used = os.wait4(pid, 0)[2]
        os.close(fd)
        with open(os.path.join(folder, "output.samples"), "rb") as file:
            rows = sum(line.startswith(b"[") for line in file)
    return 100 * (used.ru_utime + used.ru_stime) / SECONDS, rows


def main() -> int:
    """Print the table, and return 1 if the limit is exceeded."""
    gpus = [number for number in range(8) if os.path.exists(f"/dev/nvidia{number}")]
    print(f"CPU time of the sampler in {SECONDS:g} s, with {OTHERS} other processes and {len(gpus)} GPUs")
    print("processes  samples  % of a core")
    worst = 0.0
    others = start(OTHERS)
    try:
        for size in SIZES:
            task = start(size)
            try:
                percent, rows = measure(task.pid, gpus)
            finally:
                end(task)
            worst = max(worst, percent)
            print(f"{size:9}  {rows:7}  {percent:11.3f}", flush=True)
    finally:
        end(others)
    print(f"limit: {LIMIT:g}% of a core")
    return 0 if worst <= LIMIT else 1


if __name__ == "__main__":
    sys.exit(main())
