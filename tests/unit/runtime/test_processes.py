from __future__ import annotations

import os

from distflow.runtime.processes import Process, only_descendants, read_process


def process(pid: int, ppid: int) -> Process:
    return Process(pid, ppid, pid, pid, "S", 1)


def test_descendants_are_found_at_any_depth_and_order() -> None:
    tree = [process(5, 4), process(4, 3), process(3, 1), process(9, 1), process(2, 5)]
    assert {one.pid for one in only_descendants(tree, 3)} == {4, 5, 2}


def test_what_is_spared_is_spared_with_all_below_it() -> None:
    tree = [process(3, 1), process(4, 3), process(5, 4), process(6, 3)]
    assert {one.pid for one in only_descendants(tree, 3, {4})} == {6}


def test_a_loop_in_a_listing_that_was_read_while_ids_were_reused_ends() -> None:
    assert {one.pid for one in only_descendants([process(3, 4), process(4, 3)], 3)} == {4}


def test_this_process_reads_as_itself() -> None:
    me = read_process(os.getpid())
    assert me is not None
    assert (me.pid, me.ppid, me.pgid, me.sid) == (os.getpid(), os.getppid(), os.getpgrp(), os.getsid(0))
    assert me.is_alive
    assert me.start > 0


def test_a_process_that_is_not_there_is_none() -> None:
    assert read_process(2**22 + 1) is None


def test_zombies_are_not_alive() -> None:
    assert not process(1, 0)._replace(state="Z").is_alive
