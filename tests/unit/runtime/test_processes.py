"""Processes of a node: their descendants, their state in ``/proc``, and programs that do not end."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import pytest

from distflow.runtime.processes import Process, only_descendants, read_process
from distflow.testing.waiting import wait_until


def process(pid: int, ppid: int) -> Process:
    return Process(pid, ppid, pid, pid, "S", 1)


def test_descendants_are_found_at_any_depth_and_order() -> None:
    tree = [process(5, 4), process(4, 3), process(3, 1), process(9, 1), process(2, 5)]
    assert {one.pid for one in only_descendants(tree, 3)} == {4, 5, 2}


def test_spared_processes_and_their_descendants_are_left_out() -> None:
    tree = [process(3, 1), process(4, 3), process(5, 4), process(6, 3)]
    assert {one.pid for one in only_descendants(tree, 3, {4})} == {6}


def test_descendants_are_found_in_a_process_list_with_a_loop() -> None:
    # Ids may be reused while /proc is read.
    assert {one.pid for one in only_descendants([process(3, 4), process(4, 3)], 3)} == {4}


def test_the_state_of_this_process_is_read() -> None:
    me = read_process(os.getpid())
    assert me is not None
    assert (me.pid, me.ppid, me.pgid, me.sid) == (os.getpid(), os.getppid(), os.getpgrp(), os.getsid(0))
    assert me.is_alive
    assert me.start > 0


def test_the_state_of_a_missing_process_is_none() -> None:
    assert read_process(2**22 + 1) is None


def test_zombies_are_not_alive() -> None:
    assert not process(1, 0)._replace(state="Z").is_alive


HANGING_PROGRAM = """\
import sys, threading, time
threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
open(sys.argv[1], "w").write("up")
time.sleep(600)
"""
_PTRACE_SEIZE = 0x4206
_WALL = 0x40000000


@pytest.mark.slow
def test_a_killed_program_that_does_not_end_is_not_waited_for(tmp_path: Path) -> None:
    """A program may hang in a driver. This program does not end after SIGKILL before the test waits for its traced thread."""
    script = "import sys; from distflow.runtime.processes import output_of; print(output_of(sys.argv[1:], 3))"
    caller = subprocess.Popen(
        [sys.executable, "-c", script, sys.executable, "-I", "-S", "-c", HANGING_PROGRAM, str(tmp_path / "up")],
        stdout=subprocess.PIPE,
    )
    wait_until((tmp_path / "up").exists, 20)
    hanging = int(Path(f"/proc/{caller.pid}/task/{caller.pid}/children").read_text())
    thread = next(int(name) for name in os.listdir(f"/proc/{hanging}/task") if int(name) != hanging)
    ptrace = ctypes.CDLL(None, use_errno=True).ptrace
    ptrace.argtypes = [ctypes.c_long] * 4
    if ptrace(_PTRACE_SEIZE, thread, 0, 0) != 0:
        caller.communicate()
        pytest.skip(f"this process cannot trace others: {os.strerror(ctypes.get_errno())}")
    try:
        wait_until(lambda: caller.poll() is not None, 20, "`output_of` to return")
    finally:
        os.waitpid(thread, _WALL)
    assert caller.communicate()[0] == b"None\n"


def test_hide_memory_makes_a_process_not_dumpable() -> None:
    script = (
        "import ctypes; from distflow.runtime.processes import hide_memory\n"
        "is_dumpable = lambda: ctypes.CDLL(None).prctl(3, 0, 0, 0, 0)  # PR_GET_DUMPABLE\n"
        "before = is_dumpable(); hide_memory(); print(before, is_dumpable())"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "1 0\n"
