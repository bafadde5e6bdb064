"""Stacks of the processes of a running attempt, with the real py-spy."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from contract.conftest import LOCAL_TRANSPORT
from distflow.errors import AgentError
from distflow.testing.waiting import wait_until

if TYPE_CHECKING:
    from contract.conftest import NodeUnderTest

pytestmark = LOCAL_TRANSPORT

SCRIPT = """
import sys, time

def waits_for_peer(word):
    print("there", flush=True)
    time.sleep(600)

waits_for_peer("a private value")
"""
TOOLS = str(Path(sys.executable).parent)


def get_stacks(node: NodeUnderTest, attempt: str, path: str = TOOLS) -> dict[str, Any]:
    return dict(node.connect().request("stacks", attempt=attempt, env={}, path_prepend=[path], timeout_s=60))


def test_stacks_of_python_processes_are_reported(node: NodeUnderTest, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    command = ["sh", "-c", f"RANK=1 LOCAL_RANK=0 {sys.executable} {tmp_path}/train.py; true"]
    attempt = node.start(node.connect(), command)
    wait_until(lambda: "there" in node.output(attempt), 20)
    report = get_stacks(node, attempt)
    assert report["tool"] == f"{TOOLS}/py-spy"
    shell_process, python = sorted(report["processes"], key=lambda one: bool(one["is_python"]))
    assert (shell_process["name"], shell_process["is_python"], shell_process["threads"]) == ("sh", False, None)
    assert (python["ranks"], python["state"], python["parent"]) == ({"RANK": 1, "LOCAL_RANK": 0}, "S", shell_process["pid"])
    assert python["error"] is None
    frames = python["threads"][0]["frames"]
    assert [(one["function"], os.path.basename(one["file"])) for one in frames] == [
        ("waits_for_peer", "train.py"),
        ("<module>", "train.py"),
    ]
    assert frames[0]["line"] == 6
    assert report["heartbeat_age_s"] is None
    (node.directory(attempt) / "heartbeat").touch()
    assert 0 <= get_stacks(node, attempt)["heartbeat_age_s"] < 60
    assert "a private value" not in str(report)


def test_a_process_that_is_not_python_has_a_state_and_no_stack(node: NodeUnderTest, tmp_path: Path) -> None:
    attempt = node.start(node.connect(), ["sleep", "600"])
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "py-spy").symlink_to("/bin/false")
    report = get_stacks(node, attempt, str(tmp_path / "bin"))
    assert report["tool"] == str(tmp_path / "bin" / "py-spy")
    (one,) = report["processes"]
    assert (one["name"], one["state"], one["threads"], one["error"]) == ("sleep", "S", None, None)


def test_a_failing_tool_is_reported_with_its_message(node: NodeUnderTest, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    attempt = node.start(node.connect(), [sys.executable, f"{tmp_path}/train.py"])
    wait_until(lambda: "there" in node.output(attempt), 20)
    tool = tmp_path / "bin" / "py-spy"
    tool.parent.mkdir()
    for script, message in (
        ("echo 'Error: Permission Denied: Try running again' >&2; exit 1", "Error: Permission Denied: Try running again"),
        ("echo rubbish", "py-spy's output cannot be parsed"),
        ("exit 3", "py-spy failed"),
    ):
        tool.write_text(f"#!/bin/sh\n{script}\n")
        tool.chmod(0o755)
        (one,) = get_stacks(node, attempt, str(tool.parent))["processes"]
        assert (one["threads"], one["error"]) == (None, message)


RANK = """
import faulthandler, os, signal, sys, threading, time

kind = sys.argv[1]
path = f"{os.environ['DISTFLOW_ATTEMPT_DIR']}/stacks-{os.getpid()}"
if kind != "plain":
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    if kind == "left":
        os.close(file)
        signal.signal(signal.SIGUSR1, lambda *_: os._exit(9))
    if kind == "rank":
        faulthandler.register(signal.SIGUSR1, file=file, all_threads=True, chain=False)

def reads_data():
    time.sleep(600)

def reduces():
    print(kind, "is there", flush=True)
    time.sleep(600)

threading.Thread(target=reads_data, daemon=True).start()
reduces()
"""


def test_ranks_write_their_stacks_themselves_and_no_other_process_is_signaled(node: NodeUnderTest, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(RANK)
    # SIGUSR1 would end the others: `plain` and `open` do not handle it, and `left` exits and has closed the file.
    kinds = ("rank", "plain", "left", "open")
    lines = "; ".join(f"{sys.executable} {tmp_path}/train.py {kind} & echo {kind} $!" for kind in kinds)
    attempt = node.start(node.connect(), ["sh", "-c", f"{lines}; wait"])
    wait_until(lambda: node.output(attempt).count("is there") == len(kinds), 30)
    words = [line.split() for line in node.output(attempt).splitlines()]
    pids = {line[0]: int(line[1]) for line in words if len(line) == 2}
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "py-spy").symlink_to("/bin/false")
    for _ in range(2):
        processes = {one["pid"]: one for one in get_stacks(node, attempt, str(tmp_path / "bin"))["processes"]}
        assert [processes[pids[kind]]["threads"] is not None for kind in kinds] == [True, False, False, False]
        assert processes[pids["rank"]]["error"] is None
        threads = {one["name"]: one["frames"] for one in processes[pids["rank"]]["threads"]}
        assert [(one["function"], one["line"]) for one in threads["MainThread"]] == [("reduces", 19), ("<module>", 22)]
        assert threads["MainThread"][0]["file"] == f"{tmp_path}/train.py"
        (other,) = [frames for name, frames in threads.items() if name != "MainThread"]
        assert [(one["function"], one["file"]) for one in other][-1][1] == "threading.py"
        assert other[0]["function"] == "reads_data"
    assert node.record(attempt) is None


def test_stacks_of_an_attempt_that_does_not_run_are_refused(node: NodeUnderTest) -> None:
    attempt = node.start(node.connect(), ["true"])
    node.await_end(attempt)
    for name in (attempt, node.attempt()):
        with pytest.raises(AgentError) as caught:
            get_stacks(node, name)
        assert caught.value.kind == "not_running"
