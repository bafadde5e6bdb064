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

from contract.test_runtime_faults import cgroup_of, is_dead, orphan
from distflow.runtime.cleanup import reaping
from distflow.runtime.processes import read_process
from distflow.testing.waiting import wait_until

if TYPE_CHECKING:
    from contract.conftest import NodeUnderTest

Spawn = Callable[..., "subprocess.Popen[bytes]"]


@pytest.fixture
def spawn() -> Iterator[Spawn]:
    """Start orphans in sessions of their own; remaining ones are killed at the end."""
    started: list[subprocess.Popen[bytes]] = []

    def start(**environment: str) -> subprocess.Popen[bytes]:
        one = subprocess.Popen(["sleep", "600"], env=os.environ | environment, start_new_session=True)
        started.append(one)
        # Its environment is that of the program only once it has been executed.
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
    """The processes in the answer, without those of others on the machine."""
    return [(one["pid"], one["attempt"], one["why"], one["is_ours"]) for one in answer["processes"] if one["pid"] in pids]


def orphaned(node: NodeUnderTest) -> tuple[str, list[int]]:
    """An attempt whose pair was killed when no agent was there: its name, and what is left of it."""
    link = node.connect()
    # One keeps its mark and leaves the session; one drops its mark and stays; one lost both, and only its parent has the mark.
    script = 'echo $$; setsid sh -c "echo \\$\\$; env -i setsid sleep 600 & echo \\$!; wait" & env -i sleep 600 & echo $!; wait'
    attempt = node.start(link, ["sh", "-c", script])
    wait_until(lambda: node.output(attempt).count("\n") == 4)
    pids = [int(line) for line in node.output(attempt).split()]
    orphan(node, link, attempt)
    # The command itself had asked to die with its keeper.
    wait_until(lambda: is_dead(pids[0]))
    return attempt, pids[1:]


def test_remains_of_a_dead_pair_are_listed_and_then_ended(node: NodeUnderTest) -> None:
    link = node.connect()
    bystander = node.start(link, ["sleep", "600"])
    attempt, left = orphaned(node)
    seen = reap(node, dry_run=True)
    why = "the attempt's runner and keeper are gone"
    assert sorted(rows(seen, *left)) == sorted((pid, attempt, why, True) for pid in left)
    (one,) = [one for one in seen["processes"] if one["pid"] == min(left)]
    assert one["name"] in ("sh", "sleep")
    assert one["age_s"] >= 0
    assert seen["settled"] == [attempt]
    assert node.record(attempt) is None
    assert not any(is_dead(pid) for pid in left)

    done = reap(node)
    assert sorted(rows(done, *left)) == sorted(rows(seen, *left))
    assert (done["left"], done["settled"]) == ([], [attempt])
    assert all(is_dead(pid) for pid in left)
    assert (node.record(attempt) or {})["reason"] == "both_died"
    assert node.record(bystander) is None
    assert not is_dead(node.state(bystander)["command"]["pid"])
    again = reap(node)
    assert (rows(again, *left), again["settled"]) == ([], [])


def test_a_daemon_without_mark_session_or_parent_is_found_by_its_cgroup(node: NodeUnderTest) -> None:
    link = node.connect()
    script = 'env -i setsid sh -c "sleep 600 & echo \\$!"; wait; exec sleep 600'
    attempt = node.start(link, ["sh", "-c", script])
    wait_until(lambda: node.output(attempt).count("\n") == 1)
    group = cgroup_of(node, attempt)
    empty = group.with_name(f"{group.name}-nobodys")
    empty.mkdir()
    left = int(node.output(attempt))
    orphan(node, link, attempt)
    assert not is_dead(left)
    assert rows(reap(node), left) == [(left, attempt, "the attempt's runner and keeper are gone", True)]
    assert is_dead(left)
    assert (group.exists(), empty.exists()) == (False, False)


def test_survivors_of_a_record_are_ended_even_without_the_directory(node: NodeUnderTest, spawn: Spawn) -> None:
    link = node.connect()
    ended = node.start(link, ["true"])
    node.end(ended)
    removed = f"{node.workflow}/g/gone/0"
    first, second = spawn(**marked(node.root, ended)), spawn(**marked(node.root, removed))
    wait_until(lambda: is_dead(node.state(ended)["runner"]["pid"]))
    done = reap(node)
    assert rows(done, first.pid, second.pid) == [
        (first.pid, ended, "the attempt has ended (exited)", True),
        (second.pid, removed, "the attempt's directory is gone", True),
    ]
    assert (first.wait(20), second.wait(20)) == (-9, -9)


def test_a_directory_that_goes_while_it_is_looked_at_hides_no_leftover(
    node: NodeUnderTest, spawn: Spawn, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = node.start(node.connect(), ["true"])
    node.end(ended)
    wait_until(lambda: is_dead(node.state(ended)["runner"]["pid"]))
    left, isdir = spawn(**marked(node.root, ended)), os.path.isdir

    def was_there(path: str) -> bool:
        answer = isdir(path)
        if path == str(node.root.resolve() / ended):
            shutil.rmtree(path, ignore_errors=True)
        return answer

    monkeypatch.setattr(os.path, "isdir", was_there)
    found = reaping._Leftovers(str(node.root.resolve())).find()
    assert [(claim.attempt, claim.is_ours) for process, claim in found if process.pid == left.pid] == [(ended, True)]


def test_foreign_processes_are_left_alone(node: NodeUnderTest, spawn: Spawn, tmp_path: Path) -> None:
    link = node.connect()
    running = node.start(link, ["sleep", "600"])
    ended = node.start(link, ["true"])
    node.end(ended)
    wait_until(lambda: is_dead(node.state(ended)["runner"]["pid"]))
    other_root = spawn(**marked(tmp_path / "elsewhere", ended))
    beside = spawn(**marked(node.root, running))  # as `workflow exec` starts it
    foreign = spawn(DISTFLOW_ATTEMPT="a mark that distflow did not make")
    plain = spawn()
    # The id of an ended command was given to a session that began later.
    later = spawn()
    process = read_process(later.pid)
    assert process is not None
    state = node.state(ended) | {"command": {"pid": later.pid, "start": process.start}}
    (node.directory(ended) / "runner.json").write_text(json.dumps(state))
    end = node.record(ended) or {}
    (node.directory(ended) / "exit.json").write_text(json.dumps(end | {"ended_at": end["ended_at"] - 3600}))
    done = reap(node)
    strangers = [other_root, beside, foreign, plain, later]
    assert rows(done, *(one.pid for one in strangers)) == [
        (other_root.pid, ended, f"it belongs to another root, {(tmp_path / 'elsewhere').resolve()}", False)
    ]
    assert done["left"] == []
    assert all(one.poll() is None for one in strangers)
    assert not is_dead(node.state(running)["command"]["pid"])
    # Had it begun while the attempt ran, it would be a leftover.
    (node.directory(ended) / "exit.json").write_text(json.dumps(end | {"ended_at": end["ended_at"] + 3600}))
    assert rows(reap(node), later.pid) == [(later.pid, ended, "the attempt has ended (exited)", True)]
    assert later.wait(20) == -9


def test_the_end_of_an_attempt_of_an_earlier_boot_is_recorded_and_its_ids_mean_nothing(node: NodeUnderTest) -> None:
    attempt, left = orphaned(node)
    # A root that several machines share: what runs on another one looks like one of another boot.
    state = node.state(attempt) | {"boot_id": "another-boot", "host": "another-host"}
    (node.directory(attempt) / "runner.json").write_text(json.dumps(state))
    assert reap(node)["settled"] == []
    assert node.record(attempt) is None
    state["host"] = os.uname().nodename
    (node.directory(attempt) / "runner.json").write_text(json.dumps(state))
    # The one that has neither mark nor a marked parent belongs to a session of that number by chance.
    (by_session,) = [pid for pid in left if os.getsid(pid) == state["command"]["pid"]]
    done = reap(node)
    assert done["settled"] == [attempt]
    assert (node.record(attempt) or {})["reason"] == "rebooted"
    assert not is_dead(by_session)
    assert by_session not in [one["pid"] for one in done["processes"]]
    os.kill(by_session, 9)
