"""`reap` ends the remaining processes of attempts of any supervisor, and nothing else."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from contract.conftest import LOCAL_TRANSPORT
from contract.test_runtime_faults import cgroup_of, is_dead, kill_pair_without_agent
from distflow.runtime.cleanup import reaping
from distflow.runtime.processes import read_process
from distflow.testing.waiting import wait_until

if TYPE_CHECKING:
    from contract.conftest import NodeUnderTest

pytestmark = LOCAL_TRANSPORT

Spawn = Callable[..., "subprocess.Popen[bytes]"]


@pytest.fixture
def spawn() -> Iterator[Spawn]:
    """Return a function that starts a process in its own session. All of them are killed at the end."""
    started: list[subprocess.Popen[bytes]] = []

    def start(**environment: str) -> subprocess.Popen[bytes]:
        one = subprocess.Popen(["sleep", "600"], env=os.environ | environment, start_new_session=True)
        started.append(one)
        # /proc shows its environment only after the program was executed.
        wait_until(lambda: Path(f"/proc/{one.pid}/comm").read_text() == "sleep\n", 20)
        return one

    yield start
    for one in started:
        one.kill()
        one.wait()


def marked(root: Path, attempt: str) -> dict[str, str]:
    return {"DISTFLOW_ATTEMPT": attempt, "DISTFLOW_ATTEMPT_DIR": str(root.resolve() / attempt)}


def reap(node: NodeUnderTest, *, dry_run: bool = False) -> dict[str, Any]:
    return dict(node.connect().request("reap", dry_run=dry_run, timeout_s=60))


def rows(answer: dict[str, Any], *pids: int) -> list[tuple[int, str, str, bool]]:
    """Return the processes in the answer that have one of these ids."""
    return [(one["pid"], one["attempt"], one["why"], one["is_ours"]) for one in answer["processes"] if one["pid"] in pids]


def start_orphaned_attempt(node: NodeUnderTest) -> tuple[str, list[int]]:
    """Start an attempt, and kill its pair while it has no agent. Return the attempt and its remaining processes."""
    link = node.connect()
    # One process has the mark and another session, one has only the session, and one has a parent with the mark.
    script = 'echo $$; setsid sh -c "echo \\$\\$; env -i setsid sleep 600 & echo \\$!; wait" & env -i sleep 600 & echo $!; wait'
    attempt = node.start(link, ["sh", "-c", script])
    wait_until(lambda: node.output(attempt).count("\n") == 4)
    pids = [int(line) for line in node.output(attempt).split()]
    kill_pair_without_agent(node, link, attempt)
    # The kernel ends the command together with its keeper.
    wait_until(lambda: is_dead(pids[0]))
    return attempt, pids[1:]


def test_processes_of_a_dead_pair_are_listed_and_then_ended(node: NodeUnderTest) -> None:
    link = node.connect()
    bystander = node.start(link, ["sleep", "600"])
    attempt, pids = start_orphaned_attempt(node)
    listed = reap(node, dry_run=True)
    why = "the attempt's runner and keeper are gone"
    assert sorted(rows(listed, *pids)) == sorted((pid, attempt, why, True) for pid in pids)
    (one,) = [one for one in listed["processes"] if one["pid"] == min(pids)]
    assert one["name"] in ("sh", "sleep")
    assert one["age_s"] >= 0
    assert listed["settled"] == [attempt]
    assert node.record(attempt) is None
    assert not any(is_dead(pid) for pid in pids)

    reaped = reap(node)
    assert sorted(rows(reaped, *pids)) == sorted(rows(listed, *pids))
    assert (reaped["left"], reaped["settled"]) == ([], [attempt])
    assert all(is_dead(pid) for pid in pids)
    assert (node.record(attempt) or {})["reason"] == "both_died"
    assert node.record(bystander) is None
    assert not is_dead(node.state(bystander)["command"]["pid"])
    repeated = reap(node)
    assert (rows(repeated, *pids), repeated["settled"]) == ([], [])


def test_a_daemon_without_mark_session_or_parent_is_found_by_its_cgroup(node: NodeUnderTest) -> None:
    link = node.connect()
    script = 'env -i setsid sh -c "sleep 600 & echo \\$!"; wait; exec sleep 600'
    attempt = node.start(link, ["sh", "-c", script])
    wait_until(lambda: node.output(attempt).count("\n") == 1)
    group = cgroup_of(node, attempt)
    unused = group.with_name(f"{group.name}-unused")
    unused.mkdir()
    daemon = int(node.output(attempt))
    kill_pair_without_agent(node, link, attempt)
    assert not is_dead(daemon)
    assert rows(reap(node), daemon) == [(daemon, attempt, "the attempt's runner and keeper are gone", True)]
    assert is_dead(daemon)
    assert (group.exists(), unused.exists()) == (False, False)


def test_processes_that_outlive_their_attempt_are_ended_even_without_its_directory(node: NodeUnderTest, spawn: Spawn) -> None:
    link = node.connect()
    ended = node.start(link, ["true"])
    node.await_end(ended)
    removed = f"{node.workflow}/g/gone/0"
    first, second = spawn(**marked(node.root, ended)), spawn(**marked(node.root, removed))
    wait_until(lambda: is_dead(node.state(ended)["runner"]["pid"]))
    reaped = reap(node)
    assert rows(reaped, first.pid, second.pid) == [
        (first.pid, ended, "the attempt has ended (exited)", True),
        (second.pid, removed, "the attempt's directory is gone", True),
    ]
    assert (first.wait(20), second.wait(20)) == (-9, -9)


def test_a_process_is_found_although_its_directory_is_removed_during_the_search(
    node: NodeUnderTest, spawn: Spawn, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = node.start(node.connect(), ["true"])
    node.await_end(ended)
    wait_until(lambda: is_dead(node.state(ended)["runner"]["pid"]))
    orphan_process, isdir = spawn(**marked(node.root, ended)), os.path.isdir

    def check_and_remove(path: str) -> bool:
        result = isdir(path)
        if path == str(node.root.resolve() / ended):
            shutil.rmtree(path, ignore_errors=True)
        return result

    monkeypatch.setattr(os.path, "isdir", check_and_remove)
    found = reaping._Leftovers(str(node.root.resolve())).find()
    assert [(claim.attempt, claim.is_ours) for process, claim in found if process.pid == orphan_process.pid] == [(ended, True)]


def test_foreign_processes_are_left_alone(node: NodeUnderTest, spawn: Spawn, tmp_path: Path) -> None:
    link = node.connect()
    running = node.start(link, ["sleep", "600"])
    ended = node.start(link, ["true"])
    node.await_end(ended)
    wait_until(lambda: is_dead(node.state(ended)["runner"]["pid"]))
    other_root = spawn(**marked(tmp_path / "elsewhere", ended))
    of_running = spawn(**marked(node.root, running))  # as `workflow exec` starts it
    invalid_mark = spawn(DISTFLOW_ATTEMPT="a mark that distflow did not make")
    unmarked = spawn()
    # A session that began later has the id of an ended command.
    later = spawn()
    process = read_process(later.pid)
    assert process is not None
    state = node.state(ended) | {"command": {"pid": later.pid, "start": process.start}}
    (node.directory(ended) / "runner.json").write_text(json.dumps(state))
    end = node.record(ended) or {}
    (node.directory(ended) / "exit.json").write_text(json.dumps(end | {"ended_at": end["ended_at"] - 3600}))
    reaped = reap(node)
    others = [other_root, of_running, invalid_mark, unmarked, later]
    assert rows(reaped, *(one.pid for one in others)) == [
        (other_root.pid, ended, f"it belongs to another root, {(tmp_path / 'elsewhere').resolve()}", False)
    ]
    assert reaped["left"] == []
    assert all(one.poll() is None for one in others)
    assert not is_dead(node.state(running)["command"]["pid"])
    # If it had begun while the attempt ran, it would be a leftover.
    (node.directory(ended) / "exit.json").write_text(json.dumps(end | {"ended_at": end["ended_at"] + 3600}))
    assert rows(reap(node), later.pid) == [(later.pid, ended, "the attempt has ended (exited)", True)]
    assert later.wait(20) == -9


def test_the_end_of_an_attempt_of_an_earlier_boot_is_recorded_and_its_process_ids_are_ignored(node: NodeUnderTest) -> None:
    attempt, pids = start_orphaned_attempt(node)
    # On a root that several machines share, an attempt on another machine has another boot id, too.
    state = node.state(attempt) | {"boot_id": "another-boot", "host": "another-host"}
    (node.directory(attempt) / "runner.json").write_text(json.dumps(state))
    assert reap(node)["settled"] == []
    assert node.record(attempt) is None
    state["host"] = os.uname().nodename
    (node.directory(attempt) / "runner.json").write_text(json.dumps(state))
    # The process without a mark and without a marked parent only has the number of the session in common.
    (by_session,) = [pid for pid in pids if os.getsid(pid) == state["command"]["pid"]]
    reaped = reap(node)
    assert reaped["settled"] == [attempt]
    assert (node.record(attempt) or {})["reason"] == "rebooted"
    assert not is_dead(by_session)
    assert by_session not in [one["pid"] for one in reaped["processes"]]
    os.kill(by_session, 9)
