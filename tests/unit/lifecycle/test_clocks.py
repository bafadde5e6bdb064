"""The offset of a node's clock from the clock of this machine."""

from __future__ import annotations

from distflow.lifecycle.clocks import Clock, best_clock


def test_the_quickest_ping_determines_the_clock() -> None:
    assert best_clock([]) is None
    assert best_clock([(0.0, 7.0, 10.0), (20.0, 23.05, 20.1)]) == Clock(offset_s=3.0, uncertainty_s=0.05)


def test_a_time_of_a_node_is_converted_to_the_clock_of_this_machine() -> None:
    assert Clock(offset_s=-30.0, uncertainty_s=0.1).ours(1000.0) == 1030.0
