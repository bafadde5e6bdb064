"""Reports of processes that the kernel's OOM killer has killed, in a memory cgroup of the test."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from contract.conftest import LOCAL_TRANSPORT, NodeUnderTest
from distflow.testing.kernel import MemoryCgroup, missing_cgroups

pytestmark = LOCAL_TRANSPORT

USE_400_MIB = "x = bytearray(400 << 20)"


@pytest.fixture
def memory_cgroup() -> Iterator[MemoryCgroup]:
    if why := missing_cgroups():
        pytest.skip(why)
    made = MemoryCgroup(64 << 20)
    yield made
    made.close()


def _run_to_end(node: NodeUnderTest, script: str) -> tuple[int, dict[str, Any]]:
    link = node.connect()
    name = node.start(link, ["sh", "-c", script])
    pid = node.watch(link, name)["pid"]
    return pid, node.await_end(name)


def test_the_end_of_a_command_that_the_oom_killer_killed_reports_it(node: NodeUnderTest, memory_cgroup: MemoryCgroup) -> None:
    pid, end = _run_to_end(node, f"echo $$ > {memory_cgroup.procs}; exec python3 -c '{USE_400_MIB}'")
    assert (end["signal"], end["reason"]) == (signal.SIGKILL, "exited")
    assert end["kernel"]["oom_pid"] == pid
    assert f"Killed process {pid} (python3)" in end["kernel"]["lines"][-1]


def test_an_oom_kill_is_found_by_the_process_id_that_the_task_prints(node: NodeUnderTest, memory_cgroup: MemoryCgroup) -> None:
    """As under torchrun: the command prints which process was killed, and exits with its own code."""
    _, end = _run_to_end(
        node, f"sh -c 'echo $$ > {memory_cgroup.procs}; exec python3 -c \"{USE_400_MIB}\"' & wait $! || "
        'echo "exitcode: -9 (pid: $!)"; exit 1',
    )  # fmt: skip
    assert end["exit_code"] == 1
    assert f"Killed process {end['kernel']['oom_pid']} (python3)" in end["kernel"]["lines"][-1]


def test_an_oom_kill_in_the_tasks_cgroup_is_found_by_the_exit_code_of_its_shell(
    node: NodeUnderTest, memory_cgroup: MemoryCgroup
) -> None:
    """The shell does not print which process was killed. Its parent, which reads the kernel's log, is in the same cgroup."""
    _, end = _run_to_end(
        node, f"echo $PPID > {memory_cgroup.procs}; echo $$ > {memory_cgroup.procs}; python3 -c '{USE_400_MIB}'; exit $?"
    )
    assert end["exit_code"] == 128 + signal.SIGKILL
    assert end["kernel"]["oom_pid"] is not None


def test_a_sigkill_by_a_user_is_not_reported_as_an_oom_kill(node: NodeUnderTest, memory_cgroup: MemoryCgroup) -> None:
    """At the same time, the kernel kills another process of this user."""
    link = node.connect()
    name = node.start(link, ["sleep", "600"])
    pid = node.watch(link, name)["pid"]
    _, other = _run_to_end(node, f"echo $$ > {memory_cgroup.procs}; exec python3 -c '{USE_400_MIB}'")
    os.kill(pid, signal.SIGKILL)
    end = node.await_end(name)
    assert (end["signal"], (end["kernel"] or {}).get("oom_pid")) == (signal.SIGKILL, None)
    assert other["kernel"]["oom_pid"] is not None
