"""Send a file of 1 GiB and 20 000 small files to 4 SSH hosts, compared with loops of ``scp -r`` and ``rsync -a``.

The time of distflow is from ``submit`` to the end of a gang of ``true``: it reads, hashes, sends, checks and places the files.
The large file is random, so compression does not help. The small files are Python sources in 200 directories. The loops copy
to one host after the other; the loop marked ``&`` copies to all hosts at once. A second measurement sends the unchanged files
again. Fails if distflow is slower than the faster sequential loop, or takes more than 1.5 × the time of rsync for unchanged
small files.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from functools import partial
from pathlib import Path

from lab import Lab, alternate, show

HOSTS = 4
RUNS = 2
UNCHANGED_RUNS = 5
UNCHANGED_LIMIT = 1.5
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
    """Run the measurements. Return 0 if the limits are met, 1 if they are not, 2 if rsync is missing."""
    if shutil.which("rsync") is None:
        print("rsync is not installed: run `sudo apt-get install rsync`", file=sys.stderr)
        return 2
    missed = False
    with tempfile.TemporaryDirectory() as folder, Lab(HOSTS) as lab:
        large, small = Path(folder) / "large", Path(folder) / "small"
        _make_large(large)
        _make_small(small)
        for title, path in ((f"{LARGE >> 20} MiB in one file", large), (f"{SMALL} files", small)):
            first, again = _compare(lab, f"{title} to {HOSTS} hosts", path)
            missed = missed or first > 1.0 or (path == small and again > UNCHANGED_LIMIT)
    return int(missed)


def _compare(lab: Lab, title: str, path: Path) -> tuple[float, float]:
    """Return distflow's time divided by that of the faster loop for new files, and by that of rsync for unchanged files."""
    spec = SPEC.format(path=path, others=HOSTS - 1)
    loops = {
        "scp -r": f"scp -q -F {lab.ssh_config} -r {path} {{host}}:{lab.folder}/{{host}}/copy",
        "rsync -a": f"rsync -a -e '{lab.ssh}' {path} {{host}}:{lab.folder}/{{host}}/copy",
    }
    contestants = {name: partial(_loop, lab, command, " || exit 1\n") for name, command in loops.items()}
    contestants["rsync -a &"] = partial(_loop, lab, loops["rsync -a"], " &\n")
    contestants["distflow"] = partial(lab.submit, spec)
    taken = alternate(contestants, runs=RUNS, warm_up=False, settle=partial(_forget, lab))
    best = min(loops, key=lambda name: min(taken[name]))
    first = show(f"{title}, {RUNS} runs", taken, best)["distflow"]
    again = alternate({"rsync -a": contestants["rsync -a"], "distflow": contestants["distflow"]}, runs=UNCHANGED_RUNS)
    return first, show(f"{title}, unchanged, {UNCHANGED_RUNS} runs", again, "rsync -a")["distflow"]


def _loop(lab: Lab, command: str, end: str) -> None:
    lab.shell("".join(command.format(host=host) + end for host in lab.names) + "wait\n")


def _forget(lab: Lab) -> None:
    """Move the sent files away and flush the disks, so that each run starts with empty hosts.

    The files are truncated, not deleted, because ext4 creates files slowly for some seconds after deleting many.
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
