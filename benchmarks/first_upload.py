"""Send a tree of 400 MB, half text and half random bytes, to one SSH host for the first time, compared with tar and rsync.

The time of distflow is from the start of ``submit`` until the task starts: the node has then checked and placed its files.
Two parts of this time are also printed: packing (until the workflow is stored), and sending (after that). Fails if distflow
takes more than 4 × the time of ``rsync -a``. The goal is 1.5 × (see docs/performance.md).
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import sysconfig
import tempfile
from datetime import datetime
from itertools import cycle
from pathlib import Path

from lab import Lab, alternate, show

from distflow.client.client import now
from distflow.runtime.files.root_directory import PRIVATE

RUNS = 3
LIMIT = 4.0
HALF = 200 << 20
SPEC = """
workflow:
  name: upload
  tasks:
  - {{name: one, command: ["true"], files: [{{path: data, localpath: {path}}}]}}
"""


def main() -> int:
    """Run the measurement. Return 0 if the limit is met, 1 if it is not, 2 if rsync is missing."""
    if shutil.which("rsync") is None:
        print("rsync is not installed: run `sudo apt-get install rsync`", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as folder, Lab(1) as lab:
        tree = Path(folder, "tree")
        _make(tree)
        (host,) = lab.names
        copy, packing = lab.folder / host / "copy", list[float]()

        def forget() -> None:
            for path in (copy, lab.folder / "state", *(lab.folder / host / "root" / PRIVATE).glob("[!r]*")):
                shutil.rmtree(path, ignore_errors=True)
            copy.mkdir()
            os.sync()

        def distflow() -> float:
            begin = now()
            lab.submit(SPEC.format(path=tree))
            query = [sys.executable, "-m", "distflow", "workflow", "query", "upload-1", "-t", "json"]
            shown = json.loads(subprocess.run(query, env=lab.environment, capture_output=True, check=True).stdout)
            packing.append(_seconds(shown["submitted_at"]) - begin)
            return _seconds(shown["groups"][0]["tasks"][0]["started_at"]) - begin

        taken = alternate(
            {
                "tar | ssh tar": lambda: lab.shell(f"tar -C {tree} -c . | {lab.ssh} {host} tar -C {copy} -x"),
                "rsync -a": lambda: lab.shell(f"rsync -a -e '{lab.ssh}' {tree}/ {host}:{copy}"),
                "rsync -az": lambda: lab.shell(f"rsync -az -e '{lab.ssh}' {tree}/ {host}:{copy}"),
                "distflow": distflow,
            },
            runs=RUNS, warm_up=False, settle=forget,
        )  # fmt: skip
        ratio = show(f"{2 * HALF >> 20} MiB, half text, {RUNS} runs", taken, "rsync -a")["distflow"]
        sending = [total - one for total, one in zip(taken["distflow"], packing, strict=True)]
        print(f"  distflow: packing {statistics.median(packing):.2f} s, sending and placing {statistics.median(sending):.2f} s")
    return int(ratio > LIMIT)


def _seconds(at: str) -> float:
    return datetime.fromisoformat(at.replace("Z", "+00:00")).timestamp()


def _make(tree: Path) -> None:
    """Write files of 1 MiB of Python's own sources, and of 16 MiB of random bytes."""
    (tree / "text").mkdir(parents=True)
    sources = cycle(sorted(Path(sysconfig.get_path("stdlib")).glob("*/*.py")))
    for number in range(HALF >> 20):
        text = f"# {number}\n".encode()
        while len(text) < 1 << 20:
            text += next(sources).read_bytes()
        (tree / "text" / f"{number}.py").write_bytes(text[: 1 << 20])
    (tree / "random").mkdir()
    for number in range(HALF >> 24):
        (tree / "random" / f"{number}.bin").write_bytes(os.urandom(1 << 24))


if __name__ == "__main__":
    sys.exit(main())
