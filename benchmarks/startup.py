"""Measure the frequent commands, as multiples of the start of a bare Python interpreter in the same run.

``distflow --help``, ``workflow query`` and ``workflow list`` run with a store of 10 000 workflows. ``import distflow`` may take
1.5 times as long as ``python -c pass``, ``--help`` 5 times, and the other commands 7 times. The times are medians of 20
alternating runs, so changes of the machine's speed affect all commands. Fails if a command exceeds its limit.
"""

from __future__ import annotations

import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from distflow.lifecycle.states import State, WorkflowState
from distflow.plan.model import Plan
from distflow.pools.model import Pool
from distflow.state.directory import StateDirectory
from distflow.state.event_details import WorkflowSubmitted
from distflow.state.record import EventRecord, GroupRecord, TaskRecord, WorkflowRecord
from distflow.state.store import Store
from distflow.structs import replace

RUNS = 20
WORKFLOWS = 10_000
LIMITS = {"import distflow": 1.5, "distflow --help": 5.0, "distflow workflow list": 7.0, "distflow workflow query": 7.0}


def main() -> int:
    """Run the measurement. Return 0 if the limit is met, 1 otherwise."""
    with tempfile.TemporaryDirectory() as folder:
        directory = StateDirectory(Path(folder)).ensure()
        last = _fill(directory)
        distflow = str(Path(sys.executable).with_name("distflow"))
        commands = {
            "python -c pass": [sys.executable, "-c", "pass"],
            "import distflow": [sys.executable, "-c", "import distflow"],
            "distflow --help": [distflow, "--help"],
            "distflow workflow query": [distflow, "workflow", "query", last],
            "distflow workflow list": [distflow, "workflow", "list"],
        }
        environment = os.environ | {"DISTFLOW_STATE": folder}
        environment.pop("PYTHONDONTWRITEBYTECODE", None)  # without compiled modules, each run would compile all of them
        times: dict[str, list[float]] = {name: [] for name in commands}
        for turn in range(RUNS + 1):
            for name, command in commands.items():
                begin = time.perf_counter()
                subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=True)
                if turn:
                    times[name].append(time.perf_counter() - begin)
    bare = statistics.median(times["python -c pass"])
    print(
        f"{platform.machine()}, {os.cpu_count()} CPUs, Python {platform.python_version()}, {WORKFLOWS} workflows, {RUNS} runs"
    )
    print(f"{'command':<40} {'median':>9} {'minimum':>9} {'× bare':>7}")
    missed = False
    for name, taken in times.items():
        ratio = statistics.median(taken) / bare
        missed = missed or ratio > LIMITS.get(name, float("inf"))
        print(f"{name:<40} {statistics.median(taken) * 1e3:>6.0f} ms {min(taken) * 1e3:>6.0f} ms {ratio:>7.1f}")
    return int(missed)


def _fill(directory: StateDirectory) -> str:
    plan, pool = Plan(name="bench", pool="local", groups=()), Pool(name="local", backend="local", nodes=())
    tasks = tuple(TaskRecord(name=f"t{i}", lead=i == 0, state=State.COMPLETED, log_complete=True) for i in range(4))
    group = GroupRecord(name="g", tasks=tasks, state=State.COMPLETED)
    with Store(directory.store) as store:
        for number in range(WORKFLOWS):
            at = float(number)
            record = WorkflowRecord(
                uuid=f"{number:032x}",
                id="",
                name=f"bench{number % 50}",
                number=0,
                user="bench",
                pool="local",
                pool_key="local-0",
                submitted_at=at,
                groups=(group,),
            )
            event = EventRecord(at=at, details=WorkflowSubmitted(user="me", pool="lab"), workflow=record.uuid)
            stored = store.submit(record, template="", spec="", plan=plan, pool=pool, events=[event])
            store.save([replace(stored, state=WorkflowState.COMPLETED, ended_at=at)], [])
    return stored.id


if __name__ == "__main__":
    sys.exit(main())
