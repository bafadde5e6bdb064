"""Run gangs of 1 to 4 tasks with random faults on 8 SSH hosts, and report leaks, hangs and wrong records.

``make soak`` runs it for half an hour. As root, each host has its own network, and the script also cuts links. It kills the
supervisor only in the last third of the time, so that the report can show the supervisor's memory before that. The exit code
is 1 if there was a leak, a hang or a wrong record.
"""

from __future__ import annotations

import argparse
import datetime as dt
import itertools
import os
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

from chaos.hosts import ENDS, HARMLESS, HostGang, HostSchedule, draw_host_schedule, held_leases
from distflow.testing.kernel import NetnsHost, Network, missing_netns
from distflow.testing.sshd import Sshd, make_key
from distflow.testing.waiting import wait_until
from scenarios.conftest import Cli
from scenarios.lab import Lab

HOSTS = 8
AT_ONCE = 3
# A lost host would fail all gangs on it, but each fault here belongs to one gang.
GANG_ENDS = tuple(end for end in ENDS if end != "lost")
SAMPLE_S = 2.0
ANCHOR = """
workflow:
  name: anchor
  tasks:
  - {name: stays, command: [sh, -c, 'while [ ! -e GO ]; do sleep 1; done']}
"""


PURPOSE = """\
`make soak` keeps three gangs of 1 to 4 tasks running, and injects random faults. It kills processes with SIGKILL, freezes
hosts, cuts their links and restarts their sshd. In the last third of the time it also kills the supervisor. The report shows
the supervisor's memory before that. After each gang, `make soak` compares the record with the nodes: no exit code may be
missing, no task may have run twice at once, the first cause must be the injected fault, and no process may be left. This is the
report of one run."""
SUPERVISOR = (
    "The table shows the supervisor until it was first killed, in quarters of that time. Memory and open files are medians of "
    "the quarter:"
)
LEGEND = """\
In the tables, `exit` is a task that exits with an error. `host` kills all processes of a task and its node's agent at once, as
a restart of the host does. `rank`, `runner`, `keeper`, `agent`, `supervisor` and `command line` are processes that are killed.
`cut` is a cut link, `freeze` a frozen host, and `sshd` a restarted SSH server."""


class Soak:
    """A soak of a given duration, with its results."""

    def __init__(self, lab: Lab, links: Mapping[str, NetnsHost], minutes: float, seed: int) -> None:
        """Prepare a run on the hosts of ``lab``. ``links`` are the hosts whose links can be cut."""
        self.lab = lab
        self.links = links
        self.seconds = minutes * 60
        self.schedules: list[tuple[HostSchedule, float]] = []
        self.wrong: list[str] = []
        self.memory: list[tuple[float, int, int, int]] = []
        """Samples of the supervisor before the first kill: seconds, resident KiB, open files, workflows so far."""
        self._faults = (*HARMLESS, *(["cut"] if links else []))
        self._seeds = itertools.count(seed)
        self._begun = time.monotonic()

    @property
    def age_s(self) -> float:
        """Seconds since the soak began."""
        return time.monotonic() - self._begun

    @property
    def spares_supervisor(self) -> bool:
        """Whether it is too early to kill the supervisor."""
        return self.age_s < self.seconds * 2 / 3

    def run(self) -> None:
        """Run gangs until the time is over, then search for remaining processes and leases."""
        go = self.lab.cli.folder / "anchor-go"
        self.lab.submit(go, ANCHOR)
        done = threading.Event()
        with ThreadPoolExecutor(AT_ONCE + 1) as workers:
            watching = workers.submit(self._watch, done)
            gangs = [workers.submit(self._work) for _ in range(AT_ONCE)]
            for gang in gangs:
                gang.result()
            done.set()
            watching.result()
        go.touch()
        self.lab.cli.run("workflow", "query", "anchor-1")
        try:
            self.lab.await_no_processes()
        except TimeoutError:
            self.wrong += [f"left: {pid} {command[:200]}" for pid, command in self.lab.cli.processes()]
        self.wrong += [f"held: {lease}" for lease in held_leases(self.lab)]

    def _work(self) -> None:
        while self.age_s < self.seconds:
            harmless = [one for one in self._faults if one != "supervisor" or not self.spares_supervisor]
            schedule = draw_host_schedule(next(self._seeds), most_tasks=4, ends=GANG_ENDS, harmless=harmless)
            begun = time.monotonic()
            try:
                self.wrong += [f"{schedule}: {words}" for words in HostGang(self.lab, schedule, self.links).run()]
            except (AssertionError, TimeoutError) as error:
                self.wrong.append(f"{schedule}: {error}")
            self.schedules.append((schedule, time.monotonic() - begun))
            print(f"{self.age_s:6.0f} s  {len(self.schedules)} workflows, {len(self.wrong)} wrong", end="\r", file=sys.stderr)

    def _watch(self, done: threading.Event) -> None:
        while not done.wait(SAMPLE_S):
            pid = self.lab.cli.supervisor()
            if pid is not None and self.spares_supervisor:
                try:
                    status = Path(f"/proc/{pid}/status").read_text()
                    files = len(os.listdir(f"/proc/{pid}/fd"))
                except OSError:
                    continue
                kib = int(status.partition("VmRSS:")[2].split()[0])
                self.memory.append((self.age_s, kib, files, len(self.schedules)))

    def report(self, machine: str) -> str:
        """Return the report as a page of Markdown."""
        ends = Counter(schedule.end for schedule, _ in self.schedules)
        faults = Counter(fault for schedule, _ in self.schedules for fault, _ in schedule.faults)
        times = [seconds for _, seconds in self.schedules]
        quarter = max(1, len(self.memory) // 4)
        when = f"{dt.datetime.now(dt.timezone.utc):%Y-%m-%d}, {self.seconds / 60:g} minutes{machine and f', {machine}'}"
        tasks = sum(schedule.tasks for schedule, _ in self.schedules)
        lines = [
            "# A soak",
            "",
            PURPOSE,
            "",
            f"* {when}.",
            f"* {len(self.schedules)} workflows with {tasks} tasks, {AT_ONCE} at a time, on {HOSTS} hosts behind OpenSSH.",
            f"* From `submit` to the end: {statistics.median(times):.1f} s in the median, {max(times):.1f} s at most.",
            f"* Leaked, hung, or recorded wrongly: {len(self.wrong)}.",
            "",
            LEGEND,
            "",
            "| end of the gang | workflows |",
            "|---|--:|",
            *(f"| {end} | {count} |" for end, count in sorted(ends.items())),
            "",
            "| fault that ends no gang | times |",
            "|---|--:|",
            *(f"| {fault} | {count} |" for fault, count in sorted(faults.items())),
            "",
            SUPERVISOR,
            "",
            "| after | workflows so far | resident memory | open files |",
            "|--:|--:|--:|--:|",
        ]
        for at in range(0, quarter * 4, quarter):
            part = self.memory[at : at + quarter]
            if part:
                kib, files = (statistics.median(one[column] for one in part) for column in (1, 2))
                lines.append(f"| {part[-1][0]:.0f} s | {part[-1][3]} | {kib / 1024:.1f} MiB | {files:.0f} |")
        lines += ["", *(f"* {words[:1000]}" for words in self.wrong)]
        return "\n".join(lines).rstrip() + "\n"


def main() -> int:
    """Run the soak and write the report."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--minutes", type=float, default=30.0, help="duration (default: 30)")
    parser.add_argument("--seed", type=int, default=1, help="seed of the first workflow; the next ones are consecutive")
    parser.add_argument("--report", type=Path, help="file of the report (default: standard output)")
    parser.add_argument("--machine", default="", help="description of the machine for the report")
    given = parser.parse_args()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="soak-")))
        key = make_key(folder / "key" / "id")
        names = [f"gpu{number}" for number in range(1, HOSTS + 1)]
        links: dict[str, NetnsHost] = {}
        if why := missing_netns():
            print(f"links are not cut: {why}", file=sys.stderr)
            servers = {
                name: stack.enter_context(Sshd(folder / name, f"127.0.1.{number}", alias=name, user_key=key))
                for number, name in enumerate(names, 1)
            }
        else:
            network = stack.enter_context(Network())
            links = {name: network.host(folder / name, alias=name, user_key=key) for name in names}
            servers = {name: link.sshd for name, link in links.items()}
        (folder / "lab").mkdir()
        lab = Lab(Cli(folder / "lab", folder), servers)
        lab.configure(connect_timeout="2s", node_lost_after="60s", start_barrier="30s")
        soak = Soak(lab, links, given.minutes, given.seed)
        soak.run()
        wait_until(lambda: not any(server.connections() for server in servers.values()), 60, "no connection is left")
    report = soak.report(given.machine)
    if given.report:
        given.report.write_text(report)
    else:
        print(report, end="")
    return 1 if soak.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
