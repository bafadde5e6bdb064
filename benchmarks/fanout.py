"""Measure a gang of ``true`` on 64 SSH hosts, compared with ``pdsh -f 64`` in the same run. Limit: distflow is not slower.

pdsh only starts commands and collects their output. distflow also takes leases, prepares the tasks, starts them together and
records their ends. The files of the hosts are in memory: 64 hosts on one disk would measure its file system.
"""

from __future__ import annotations

import shutil
import sys

from lab import Lab, alternate, show

HOSTS = 64
RUNS = 5
SPEC = f"""
workflow:
  name: fanout
  groups:
  - name: all
    tasks:
    - name: lead
      lead: true
      ranks: {{size: 1}}
      command: ["true"]
    - name: other
      replicas: {HOSTS - 1}
      ranks: {{size: 1}}
      command: ["true"]
"""


def main() -> int:
    """Run the measurement. Return 0 if the limit is met, 1 if it is not, 2 if pdsh is missing."""
    if shutil.which("pdsh") is None:
        print("pdsh is not installed: run `sudo apt-get install pdsh`", file=sys.stderr)
        return 2
    with Lab(HOSTS, in_memory=True) as lab:
        lab.environment["PDSH_SSH_ARGS"] = f"-F {lab.ssh_config} %h"
        pdsh = f"pdsh -S -R ssh -f {HOSTS} -w {','.join(lab.names)} true"
        contestants = {"pdsh": lambda: lab.shell(pdsh), "distflow": lambda: lab.submit(SPEC)}
        taken = alternate(contestants, runs=RUNS, settle=lab.settle)
        ratios = show(f"`true` on {HOSTS} hosts, {RUNS} runs", taken, "pdsh")
    return int(ratios["distflow"] > 1.0)


if __name__ == "__main__":
    sys.exit(main())
