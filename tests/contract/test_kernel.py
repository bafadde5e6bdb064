"""Ends that were the kernel's doing: it really kills here, in a memory cgroup of the test's own."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from contract.conftest import NodeUnderTest
from distflow.testing.kernel import MemoryCgroup, missing_cgroups

EATER = "x = bytearray(400 << 20)"


@pytest.fixture
def limit() -> Iterator[MemoryCgroup]:
    if why := missing_cgroups():
        pytest.skip(why)
    made = MemoryCgroup(64 << 20)
    yield made
    made.close()


def _end(node: NodeUnderTest, script: str) -> tuple[int, dict[str, Any]]:
    link = node.connect()
    name = node.start(link, ["sh", "-c", script])
    pid = node.watch(link, name)["pid"]
    return pid, node.end(name)


def test_a_command_that_the_kernel_killed_for_its_memory_says_so(node: NodeUnderTest, limit: MemoryCgroup) -> None:
    pid, end = _end(node, f"echo $$ > {limit.procs}; exec python3 -c '{EATER}'")
    assert (end["signal"], end["reason"]) == (signal.SIGKILL, "exited")
    assert end["kernel"]["oom_pid"] == pid
    assert f"Killed process {pid} (python3)" in end["kernel"]["lines"][-1]


def test_a_process_that_the_task_names_as_killed_is_found(node: NodeUnderTest, limit: MemoryCgroup) -> None:
    """As under torchrun: the command lives on, says which process was killed, and ends with a code of its own."""
    _, end = _end(
        node, f"sh -c 'echo $$ > {limit.procs}; exec python3 -c \"{EATER}\"' & wait $! || "
        'echo "exitcode: -9 (pid: $!)"; exit 1',
    )  # fmt: skip
    assert end["exit_code"] == 1
    assert f"Killed process {end['kernel']['oom_pid']} (python3)" in end["kernel"]["lines"][-1]


def test_a_child_that_was_killed_in_the_tasks_own_cgroup_is_found_by_its_shells_code(
    node: NodeUnderTest, limit: MemoryCgroup
) -> None:
    """The shell does not say which process it was; its parent, which asks, is in that cgroup as it is on a real node."""
    _, end = _end(node, f"echo $PPID > {limit.procs}; echo $$ > {limit.procs}; python3 -c '{EATER}'; exit $?")
    assert end["exit_code"] == 128 + signal.SIGKILL
    assert end["kernel"]["oom_pid"] is not None


def test_a_kill_by_hand_is_not_the_kernels(node: NodeUnderTest, limit: MemoryCgroup) -> None:
    """Though in the same moments the kernel kills another process of this user."""
    link = node.connect()
    name = node.start(link, ["sleep", "600"])
    pid = node.watch(link, name)["pid"]
    _, other = _end(node, f"echo $$ > {limit.procs}; exec python3 -c '{EATER}'")
    os.kill(pid, signal.SIGKILL)
    end = node.end(name)
    assert (end["signal"], (end["kernel"] or {}).get("oom_pid")) == (signal.SIGKILL, None)
    assert other["kernel"]["oom_pid"] is not None
