"""A file of 1 GiB and 20 000 small files to 4 SSH hosts, against loops of ``scp -r`` and ``rsync -a`` in the same run.

distflow is timed as a whole, from ``submit`` to the end of a gang whose command is ``true``: it reads, hashes, sends, checks
and places the files. The large file is random, so nothing can be packed; the small ones are Python sources in 200 directories.
The loops take one host after the other, as they are typed; ``&`` marks one that takes all hosts at once. Then once more,
unchanged: nothing may be sent. Fails when distflow is slower than the faster loop.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from functools import partial
from pathlib import Path

from lab import Lab, in_turns, show

HOSTS = 4
RUNS = 2
LARGE = 1 << 30
SMALL = 20_000
SPEC = """
workflow:
  name: staging
  groups:
  - name: all
    tasks:
    - name: lead
      lead: true
      ranks: {{size: 1}}
      command: ["true"]
      files: [{{path: /data, localpath: {path}}}]
    - name: other
      replicas: {others}
      ranks: {{size: 1}}
      command: ["true"]
      files: [{{path: /data, localpath: {path}}}]
"""


def main() -> int:
    """Measure, print, and say by the exit code whether distflow is as fast as the loops."""
    if shutil.which("rsync") is None:
        print("rsync not found: apt-get install rsync", file=sys.stderr)
        return 2
    missed = False
    with tempfile.TemporaryDirectory() as folder, Lab(HOSTS) as lab:
        large, small = Path(folder) / "large", Path(folder) / "small"
        _make_large(large)
        _make_small(small)
        for title, path in ((f"{LARGE >> 20} MiB in one file", large), (f"{SMALL} files", small)):
            ratios = _compare(lab, f"{title} to {HOSTS} hosts, {RUNS} runs", path)
            missed = missed or ratios["distflow"] > 1.0
    return int(missed)


def _compare(lab: Lab, title: str, path: Path) -> dict[str, float]:
    spec = SPEC.format(path=path, others=HOSTS - 1)
    loops = {
        "scp -r": f"scp -q -F {lab.ssh_config} -r {path} {{host}}:{lab.folder}/{{host}}/copy",
        "rsync -a": f"rsync -a -e '{lab.ssh}' {path} {{host}}:{lab.folder}/{{host}}/copy",
    }
    contestants = {name: partial(_loop, lab, command, " || exit 1\n") for name, command in loops.items()}
    contestants["rsync -a &"] = partial(_loop, lab, loops["rsync -a"], " &\n")
    contestants["distflow"] = partial(lab.submit, spec)
    taken = in_turns(contestants, runs=RUNS, warm_up=False, settle=partial(_forget, lab))
    best = min(loops, key=lambda name: min(taken[name]))
    ratios = show(title, taken, best)
    again = in_turns({"rsync -a": contestants["rsync -a"], "distflow": contestants["distflow"]}, runs=RUNS)
    show(f"{title}, unchanged", again, "rsync -a")
    return ratios


def _loop(lab: Lab, command: str, end: str) -> None:
    lab.shell("".join(command.format(host=host) + end for host in lab.names) + "wait\n")


def _forget(lab: Lab) -> None:
    """Put away what was sent: every turn begins with hosts that have nothing, and with nothing left to write.

    It is not removed but emptied: ext4 is slow to make files for some seconds after many were deleted.
    """
    for host in lab.names:
        trash = Path(tempfile.mkdtemp(dir=lab.folder))
        for entry in (lab.folder / host / "copy", *(lab.folder / host / "root").glob("*")):
            if entry.exists() and entry.name != "runtime":
                entry.rename(trash / entry.name)
        (lab.folder / host / "copy").mkdir()
        for path in trash.rglob("*"):
            if path.is_file() and path.stat().st_size > 1 << 20:
                os.truncate(path, 0)
    os.sync()


def _make_large(path: Path) -> None:
    with path.open("wb") as file:
        for _ in range(LARGE >> 20):
            file.write(os.urandom(1 << 20))


def _make_small(folder: Path) -> None:
    source = Path(__file__).read_text()
    for number in range(SMALL):
        path = folder / f"d{number % 200}" / f"module_{number}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"# {number}\n{source[number % 1000 :][:2000]}\n")


if __name__ == "__main__":
    sys.exit(main())
