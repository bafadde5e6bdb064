"""The disk of the state directory fills up while a gang runs. When it has room again, no event and no output is missing."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from distflow.lifecycle.states import WorkflowState
from distflow.state.store import Store
from distflow.testing.waiting import wait_until
from scenarios.conftest import Cli

SPEC = """
workflow:
  name: full
  groups:
  - name: train
    tasks:
    - name: master
      lead: true
      ranks: {size: 1}
      command: [sh, -c, 'echo begins; while [ ! -e GO ]; do sleep 0.2; done; echo ends; exit 7']
    - name: worker
      ranks: {size: 1}
      command: [sh, -c, 'while :; do sleep 0.2; done']
"""


@pytest.fixture
def small_disk(cli: Cli) -> Iterator[Cli]:
    """A distflow whose state directory is on a disk of 8 MiB."""
    cli.state.mkdir(mode=0o700)
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m,mode=700", "tmpfs", str(cli.state)], check=False).returncode != 0:
        pytest.skip("mounting a small disk needs root")
    try:
        yield cli
    finally:
        subprocess.run(["umount", "-l", str(cli.state)], check=True)


@pytest.fixture
def medium_disk(cli: Cli) -> Iterator[Cli]:
    """A distflow whose state directory is on a disk of 64 MiB."""
    cli.state.mkdir(mode=0o700)
    if (
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m,mode=700", "tmpfs", str(cli.state)], check=False).returncode
        != 0
    ):
        pytest.skip("mounting a small disk needs root")
    try:
        yield cli
    finally:
        subprocess.run(["umount", "-l", str(cli.state)], check=True)


def _fill(folder: Path) -> Path:
    """Fill the disk, and return the file to remove."""
    path = folder / "filler"
    with path.open("wb") as file:
        for size in (1 << 16, 1 << 12, 1):
            try:
                while True:
                    os.write(file.fileno(), bytes(size))
            except OSError:
                continue
    return path


def _state(cli: Cli, ident: str) -> WorkflowState:
    with Store(cli.state / "distflow.sqlite3") as store:
        return store.find(ident).state


def test_events_during_a_full_state_disk_are_recorded_afterwards(small_disk: Cli) -> None:
    cli, go = small_disk, small_disk.folder / "go"
    ident = cli.submit(cli.spec(SPEC.replace("GO", str(go))))
    cli.await_running(ident)
    cli.await_log(ident, "begins")
    filler = _fill(cli.state)
    go.touch()
    # The gang ends on its nodes, even if the end cannot be recorded.
    wait_until(lambda: not [line for _, line in cli.processes() if "sleep 0.2; done" in line], 60, "no task runs")
    wait_until(lambda: cli.supervisor() is None, 30, "the supervisor ends, because it cannot write")
    shown = cli.run("workflow", "query", ident)
    assert (shown.code, "Status       RUNNING" in shown.out) == (0, True)
    assert f"none can start, because the disk of {cli.state} is full" in shown.err
    refused = cli.run("workflow", "submit", cli.spec(SPEC, "other.yaml"))
    assert (refused.code, "No space left on device" in refused.err) == (5, True)
    # The supervisor's log is on the same full disk.
    assert "Traceback" not in (cli.state / "supervisor.log").read_text()
    # No user has to act: the supervisor waits for room.
    filler.unlink()
    wait_until(lambda: _state(cli, ident).is_final, 60, "the end is recorded")
    body = cli.await_status(ident, "FAILED")
    tasks = cli.tasks(ident)
    assert tasks["master"]["exit_code"] == 7
    assert body["groups"][0]["first_cause"]["task"] == "master"
    assert cli.logs(ident).splitlines() == ["[master] begins", "[master] ends"]
    wait_until(lambda: cli.supervisor() is None, 30)


RUNAWAY = """
workflow:
  name: runaway
  groups:
  - name: train
    tasks:
    - name: master
      lead: true
      ranks: {size: 1}
      command: [sh, -c, "yes $(printf %0999d 0) | head -n 30000; while [ ! -e GO ]; do sleep 0.2; done; echo ends; exit 7"]
    - name: worker
      ranks: {size: 1}
      command: [sh, -c, 'while :; do sleep 0.2; done']
"""


def test_output_leaves_space_in_reserve_on_the_state_disk_and_supervision_continues(medium_disk: Cli) -> None:
    cli, go = medium_disk, medium_disk.folder / "go"
    (cli.folder / "distflow.yaml").write_text(f"pools: {{local: {{backend: local, root: {cli.folder / 'node'}}}}}\n")
    filler = cli.state / "filler"
    filler.write_bytes(bytes(40 << 20))
    ident = cli.submit(cli.spec(RUNAWAY.replace("GO", str(go))))
    cli.await_running(ident)
    words = "its printed output stays on local: this machine's disk is almost full or fails; free space here"
    cli.await_event(ident, words)
    found = os.statvfs(cli.state)
    assert found.f_bavail * found.f_frsize > 2 << 20
    shown = cli.run("workflow", "query", ident)
    assert "has less than 3.2 MiB of free space, so new output stays on the nodes" in shown.err
    go.touch()
    # The end of the gang is recorded although the disk is almost full.
    assert cli.await_status(ident, "FAILED")["groups"][0]["first_cause"]["exit_code"] == 7
    assert cli.supervisor() is not None, "the supervisor waits until it can store the output"
    filler.unlink()
    wait_until(lambda: cli.supervisor() is None, 60, "all output is stored")
    lines = cli.logs(ident).splitlines()
    assert (len(lines), lines[-1]) == (30_001, "[master] ends")


LONG_OUTPUT = """
workflow:
  name: runaway
  max_log: 1Mi
  tasks:
  - {name: a, command: [sh, -c, 'yes 0123456789abcdef | head -n 200000; echo the end']}
"""


def test_output_longer_than_max_log_keeps_its_beginning_and_its_end(cli: Cli) -> None:
    assert cli.run("workflow", "submit", cli.spec(LONG_OUTPUT), "--wait").code == 0
    lines = cli.run("workflow", "logs", "runaway-1").out.splitlines()
    assert (lines[0], lines[-1]) == ("[a] 0123456789abcdef", "[a] the end")
    assert sum("were not kept here, see `max_log`" in line for line in lines) == 1
    assert sum(map(len, lines)) < 2 << 20
