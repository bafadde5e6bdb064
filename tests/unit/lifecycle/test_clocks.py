"""How far a node's clock is from ours."""

from __future__ import annotations

from distflow.lifecycle.clocks import Clock, best_clock


def test_the_quickest_ping_tells_the_clock() -> None:
    assert best_clock([]) is None
    assert best_clock([(0.0, 7.0, 10.0), (20.0, 23.05, 20.1)]) == Clock(offset_s=3.0, uncertainty_s=0.05)


def test_a_time_is_told_by_our_clock() -> None:
    assert Clock(offset_s=-30.0, uncertainty_s=0.1).ours(1000.0) == 1030.0
